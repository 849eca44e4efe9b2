#!/usr/bin/env bash
# Stands in for the program of a cloud, a cluster or a machine whose name it has.
#
# The folder $WORLD holds the state as files:
#   calls     each call as its arguments, separated by \x1f and ended by \x1e
#   resource  the state of the queued resource, `node` the slice's: a line per
#             description, of which the last one stays
#   workers   a home for each machine
#   exits     the status of the training on a machine, or `preempted`, a line per run
set -u
program=${0##*/}

record() {
  local IFS=$'\x1f'
  printf '%s\x1e' "$*" >>"$WORLD/calls"
}

take() {  # file, [last]: prints and removes its first line, except the last one
  local lines=()
  [[ ! -e $1 ]] || mapfile -t lines <"$1"
  ((${#lines[@]})) || return 0
  echo "${lines[0]}"
  [[ ${2-} == last && ${#lines[@]} == 1 ]] && return
  sed -i 1d "$1"
}

play_gcloud() {
  local kind=$3 verb=$4 name=$5 file=resource state home
  case $verb in
    describe)
      [[ $kind == tpu-vm ]] && file=node
      state=$(take "$WORLD/$file" last)
      [[ -n $state ]] && echo "$state" && return
      echo "ERROR: (gcloud.compute.tpus.describe) NOT_FOUND: no resource" >&2
      return 1
      ;;
    create)
      mkdir -p "$WORLD"/workers/{0,1}
      echo READY >"$WORLD/node"
      printf '%s\n' WAITING_FOR_RESOURCES PROVISIONING ACTIVE >"$WORLD/resource"
      ;;
    delete) rm -rf "$WORLD"/{workers,resource,node} ;;
    scp) for home in "$WORLD"/workers/*; do cp "$name" "$home"; done ;;
    ssh) play_ssh "$@" ;;
  esac
}

play_ssh() {  # runs a command at home on one machine or all; the first failure counts
  local argument worker command place status=0 pids=()
  for argument; do
    case $argument in
      --worker=*) worker=${argument#*=} ;;
      --command=*) command=${argument#*=} ;;
    esac
  done
  [[ -e $WORLD/workers ]] || return 255
  for place in 0 1; do
    [[ $worker == all || $worker == "$place" ]] || continue
    (cd "$WORLD/workers/$place" && HOME=$PWD HOSTNAME=worker-$place exec bash -c "$command") &
    pids+=($!)
  done
  for place in "${pids[@]}"; do
    wait "$place" || ((status)) || status=$?
  done
  grep --quiet ACTIVE "$WORLD/resource" || return 255
  return "$status"
}

play_python3() {  # installs the package on a machine
  [[ $* == "-m uv venv "* ]] || return 0
  mkdir -p .venv/bin
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexec training "$@"\n' >.venv/bin/python
  chmod +x .venv/bin/python
}

play_curl() { echo "${HOME##*/}"; }  # the metadata server's number of the machine

play_training() {
  local place=${SLURM_PROCID:-${HOME##*/}} status
  record training "$place" "$@"
  echo "training on $place"
  status=$(take "$WORLD/exits/$place")
  [[ $status != preempted ]] || { echo SUSPENDED >"$WORLD/resource"; status=75; }
  return "${status:-1}"
}

play_srun() {  # runs the command in every task
  local task
  while [[ $1 != bash ]]; do shift; done
  for ((task = 0; task < SLURM_NTASKS; task++)); do
    SLURM_PROCID=$task "$@" | sed "s/^/$task: /" &
  done
  wait
}

play_squeue() { echo RUNNING; }

play_scontrol() { :; }

case $program in gcloud | srun | scontrol) record "$program" "$@" ;; esac
"play_$program" "$@"
