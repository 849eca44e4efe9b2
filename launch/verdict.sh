#!/usr/bin/env bash
# One status of a run out of those of its processes, one a line on stdin.
#
# When one process fails, the others notice and end with 75 (2 after a user error), or the
# runtime aborts them (134): these are consequences. So what any other process says comes first.
#   2     the user's mistake
#   N     any other failure, such as 1 or 137 (killed, mostly for memory)
#   75    again; so does `lost`: its machine stopped before it could say
#   134   aborted or hung (`stuck`), and nobody says why
#   0     done, and all say so
set -euo pipefail

seen=$(cat)
cause=$(grep --invert-match --line-regexp --extended-regexp '0|75|134|lost|stuck' \
  <<<"$seen" | sort --numeric-sort --reverse | head -n 1) || true
if grep --quiet --line-regexp 2 <<<"$seen"; then
  echo 2
elif [[ -z $seen ]]; then
  echo 134
elif [[ -n $cause ]]; then
  echo "$cause"
elif grep --quiet --line-regexp --extended-regexp '75|lost' <<<"$seen"; then
  echo 75
elif grep --quiet --line-regexp --extended-regexp '134|stuck' <<<"$seen"; then
  echo 134
else
  echo 0
fi
