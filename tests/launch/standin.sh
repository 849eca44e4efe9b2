#!/usr/bin/env bash
# Stands in for the program of a cloud, a cluster or a machine whose name it has.
#
# The folder $WORLD holds the state as files:
#   calls     each call as its arguments, separated by \x1f and ended by \x1e; a newline
#             in them is \x1d, because bash writes line by line, and calls may overlap
#   resource  the state of the queued resource, `node` the slice's: a line per
#             description, of which the last one stays
#   trouble   a line per future failure: a word of the call, the status, and `late` if
#             the call does its work before it fails
#   workers   a home for each machine
#   exits     the behaviour of the training on a machine, a line per run
set -u
program=${0##*/}

record() {
  local IFS=$'\x1f'
  local call="$*"
  printf '%s\x1e' "${call//$'\n'/$'\x1d'}" >>"$WORLD/calls"
}

take() {  # file, [last]: prints and removes its first line, except the last one
  local lines=()
  [[ ! -e $1 ]] || mapfile -t lines <"$1"
  ((${#lines[@]})) || return 0
  echo "${lines[0]}"
  [[ ${2-} == last && ${#lines[@]} == 1 ]] && return
  sed -i 1d "$1"
}

stumble() {  # late or '', call: exits if the next trouble is meant for the call
  local when=$1 word status late
  shift
  read -r word status late 2>/dev/null <"$WORLD/trouble" || return 0
  [[ " ${*//$'\n'/ } " == *" $word "* && $late == "$when" ]] || return 0
  take "$WORLD/trouble" >/dev/null
  echo "ERROR: as planned" >&2
  exit "$status"
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
  if [[ $worker == all ]]; then
    for place in 0 1; do
      on_machine "$place" "$command" &
      pids+=($!)
    done
    for place in "${pids[@]}"; do
      wait "$place" || ((status)) || status=$?
    done
  else
    on_machine "$worker" "$command"
    status=$?
  fi
  grep --quiet ACTIVE "$WORLD/resource" || return 255
  return "$status"
}

on_machine() {  # place, command
  (cd "$WORLD/workers/$1" && HOME=$PWD HOSTNAME=worker-$1 exec bash -c "$2")
}

play_python3() {  # installs the package on a machine
  [[ $* == "-m uv venv "* ]] || return 0
  mkdir -p .venv/bin
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nexec training "$@"\n' >.venv/bin/python
  chmod +x .venv/bin/python
}

play_curl() { echo "${HOME##*/}"; }  # the metadata server's number of the machine

play_sudo() { "$@"; }

play_findmnt() { cat "$HOME/mounted" 2>/dev/null; }

play_mount() {  # mounts a share, or fails as a server that does not have it
  local share=${*: -2:1} folder=${*: -1}
  if [[ $share == */gone ]]; then
    printf 'a warning\nmount.nfs: No such file or directory\n' >&2
    return 32
  fi
  [[ -d $folder ]] || return 1
  echo "$share" >"$HOME/mounted"
  chmod 555 "$folder"  # a new share belongs to root
  record mounted "${HOME##*/}" "$@"
}

play_apt_get() {
  record apt-get "$@"
  [[ $* == *install* && -n ${NO_PACKAGES-} ]] || return 0
  echo "E: Unable to locate package nfs-common" >&2
  return 100
}

play_flock() {  # with --timeout: gives up as soon as the training on the machine hangs
  [[ $* == *--timeout* ]] || { command -p flock "$@"; return; }
  until rm "$HOME/hangs" 2>/dev/null && return 1; do
    command -p flock --shared --nonblock train.lock true && return
    sleep 0.05
  done
}

play_training() {  # a status, `preempted`, `hangs`, or `followed N`: until N follow it
  local place=${SLURM_PROCID:-${HOME##*/}} action
  record training "$place" "$@"
  echo "training on $place"
  action=$(take "$WORLD/exits/$place")
  case $action in
    preempted) echo SUSPENDED >"$WORLD/resource"; return 75 ;;
    hangs) touch "$HOME/hangs"; exec sleep 3600 ;;
    followed*) until (($(tr '\36' '\n' <"$WORLD/calls" | grep -c ' follow ') >= ${action#* })); do
      sleep 0.05
    done ;;
    *) return "${action:-1}" ;;
  esac
}

play_srun() {  # runs the command in every task; the largest status is srun's
  local task status=0 ended pids=() label=''
  [[ " $* " != *" --label "* ]] || label=yes
  while [[ $1 != bash ]]; do shift; done
  for ((task = 0; task < SLURM_NTASKS; task++)); do
    (set -o pipefail; SLURM_PROCID=$task "$@" | sed "${label:+s/^/$task: /}") &
    pids+=($!)
  done
  for task in "${pids[@]}"; do
    wait "$task"
    ended=$?
    ((ended > status)) && status=$ended
  done
  return "$status"
}

play_squeue() { cat "$WORLD/job"; }

play_scontrol() { :; }

case $program in
  gcloud | srun | squeue | scontrol)
    record "$program" "$@"
    stumble '' "$@"
    "play_$program" "$@"
    status=$?
    stumble late "$@"
    exit "$status"
    ;;
  *) "play_${program//-/_}" "$@" ;;
esac
