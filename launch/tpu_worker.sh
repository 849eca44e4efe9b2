#!/usr/bin/env bash
# Commands that tpu_vm.sh runs over ssh on each worker of a slice. Training runs detached,
# so a lost connection costs nothing, and every command may be repeated.
#
#   mount SHARE   ADDRESS:/SHARE at /mnt/txl, unless it is there
#   install       Python and the package, unless they are there
#   start         train.sh in the background, unless it runs
#   follow LINES  the log from LINES (+1, or the newest N) until the training ends, each
#                 line after this worker's number
#   await         only waits for the end
#   status        prints `txl_jax-status running`, or how it ended
#   finish        the same, but waits for the end, and kills a training that hangs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=3.12           # the images' own is too old for jax
finish_seconds=120    # jax takes up to 60 to end the other processes
folder=/mnt/txl

fail() { echo "tpu_worker.sh: $HOSTNAME: $1" >&2; exit 1; }
last() { tail --lines=1 <<<"${1:-no answer}"; }

# Servers of NFS 3, such as Filestore's basic tiers, are not told that a machine with a
# lock was taken away, so locks are local there. NFS 4 ignores `nolock`.
mount() {
  local there said
  there=$(findmnt --noheadings --output=SOURCE --mountpoint="$folder") || true
  if [[ -z $there ]]; then
    command -v mount.nfs >/dev/null || said=$(install_nfs 2>&1) ||
      fail "nfs-common cannot be installed: $(last "$said")"
    said=$(sudo mkdir -p "$folder" 2>&1 &&
      sudo timeout 120 mount -t nfs -o nolock,retry=0 "$1" "$folder" 2>&1) ||
      fail "$1 cannot be mounted at $folder: $(last "$said")"
  elif [[ $there != "$1" ]]; then
    fail "$1 cannot be mounted at $folder: $there is there already"
  fi
  # A new share belongs to root.
  [[ -w $folder ]] || sudo chmod 777 "$folder" 2>/dev/null || true
  [[ -w $folder ]] || fail "$1 cannot be written to: its server allows neither this user nor root"
}

install_nfs() {  # a machine that has just started may be installing other things
  sudo apt-get -o DPkg::Lock::Timeout=300 --quiet --quiet update &&
    sudo env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 \
      --quiet --quiet --yes install nfs-common
}

install() {
  cmp --quiet setup.py .installed && return
  # Newer Ubuntus refuse this otherwise; an older pip ignores the variable.
  PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --quiet --user uv
  python3 -m uv venv --quiet --clear --python "$python" .venv
  python3 -m uv pip install --quiet --python .venv/bin/python --editable '.[tpu,gcs]'
  cp setup.py .installed
}

# The training process holds this lock until it ends or the machine reboots.
start() {
  exec 9>train.lock
  flock --exclusive --nonblock 9 || return 0
  rm -f train.status
  setsid bash launch/tpu_worker.sh train >train.log 2>&1 </dev/null &
  echo $! >train.pid
}

train() {
  local status=0
  umask 0  # on the share: machines may number the user differently
  trap : TERM  # the signal is for the program, whose status must be kept
  bash train.sh || status=$?
  echo "$status" >train.status
}

await() {
  touch train.log train.lock
  flock --shared train.lock true
}

# Puts the worker's number, which jax and `gcloud --worker` also use, before each line.
numbered() {
  local number
  number=$(curl --silent --fail --header 'Metadata-Flavor: Google' \
    http://metadata.google.internal/computeMetadata/v1/instance/attributes/agent-worker-number) ||
    number=$HOSTNAME
  sed --unbuffered "s/^/$number: /"
}

follow() {
  touch train.log
  await &
  # tail prints the last lines before it ends.
  tail --pid=$! --lines="$1" --follow=name --retry --sleep-interval=0.1 train.log \
    2>/dev/null | numbered
}

ended() {
  local how=lost
  [[ -s train.status ]] && how=$(<train.status)
  [[ $how == 0 ]] || tail --lines=20 train.log | numbered || true
  echo "txl_jax-status $how"
}

status() {
  if [[ -e train.lock ]] && ! flock --shared --nonblock train.lock true; then
    echo "txl_jax-status running"
  else
    ended
  fi
}

finish() {
  touch train.log train.lock
  if ! flock --shared --timeout "$finish_seconds" train.lock true; then
    kill -KILL -- "-$(<train.pid)"  # start made it a group of its own
    echo stuck >train.status
  fi
  ended
}

"$@"
