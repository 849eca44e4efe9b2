#!/usr/bin/env bash
# One status of a run out of those of its processes, one a line on stdin.
#
# When one process fails, the others notice and end with 75 (2 after a user error), or the
# runtime aborts them (134): these are consequences. So any other status comes first.
#   2     a user error
#   N     any other failure, such as 1 or 137 (killed, mostly for memory)
#   75    retry; also for `lost`: the machine stopped before it could report a status
#   134   aborted or hung (`stuck`), for an unknown reason
#   0     done, on all processes
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
