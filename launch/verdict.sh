#!/usr/bin/env bash
# Combines the statuses of a run's processes, one a line on stdin, into one.
#
# When one process fails, the others end with 75, or jax aborts them (134): these are
# consequences. So any other status comes first.
#   2     a user error
#   76    non-finite updates or results
#   130   interrupted by a person
#   N     any other failure, such as 1 or 137 (killed, mostly for memory)
#   75    retry; also for `lost`, when the machine stopped before it could report a
#         status, for `stuck`, and for 134 alone
#   0     done, on all processes
# Only 0, 2, 76 and 130 are final: after any other status the run is started again.
set -euo pipefail

seen=$(cat)
has() { grep --quiet --line-regexp --extended-regexp "$1" <<<"$seen"; }

for final in 2 76 130; do
  if has "$final"; then echo "$final"; exit; fi
done
cause=$(grep --invert-match --line-regexp --extended-regexp '0|75|134|lost|stuck|' \
  <<<"$seen" | sort --numeric-sort --reverse | head -n 1) || true
if [[ -n $cause ]]; then
  echo "$cause"
elif [[ -z $seen ]] || has '75|134|lost|stuck'; then
  echo 75
else
  echo 0
fi
