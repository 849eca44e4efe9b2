#!/usr/bin/env bash
# Trains on a Cloud TPU slice: creates the slice as a queued resource, waits for it,
# installs the package on all workers, trains in a workdir on gs:// or on a mounted share,
# follows the logs of all workers, and deletes the slice. When the slice is taken away, or
# the training ends with a status that is not final (verdict.sh), the script repeats all
# of this; the training resumes from its workdir.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: launch/tpu_vm.sh --name=NAME --zone=ZONE --accelerator_type=TYPE \
           [flags] -- \
           --config=experiments/wt103.py --workdir=gs://BUCKET/wt103 [training flags]
       launch/tpu_vm.sh --name=NAME --zone=ZONE --delete

  --name=NAME              of the queued resource and of its node
  --zone=ZONE              such as us-west4-a
  --accelerator_type=TYPE  such as v5litepod-8, v5litepod-16, v4-32, v5p-8, v6e-8
  --nfs=ADDRESS:/SHARE     of Filestore or any other NFS server in the slice's network;
                           every machine mounts it at /mnt/txl, for a workdir there
  --runtime_version=NAME   the machine's image (default: the one for its type)
  --project=PROJECT        (default: gcloud's)
  --spot                   cheap machines that may be taken away at any time
  --max_restarts=N         give up after so many (default: 100)
  --keep                   keep the slice at the end; it still costs money
  --delete                 delete the slice, whatever runs on it, and nothing else
  --dry_run                print the commands and run none

After -- everything goes to `python -m txl_jax.main` on every worker. The lines of all
logs are shown, each after its worker's number. Interrupting this script leaves the slice
training: the same command follows it again.
Status: 0 trained, 2 a mistake in the flags, 1 a failure of the cloud's, else the
training's own. TPU_VM_POLL_SECONDS (default 30) is the time between two looks.
EOF
}

say() { echo "tpu_vm.sh: $*" >&2; }
fail() { say "$2"; exit "$1"; }
mistake() { fail 2 "$1; see --help"; }

name='' zone='' accelerator_type='' nfs='' runtime_version='' project='' max_restarts=100
spot=0 keep=0 delete=0 dry_run=0
training=() where=()
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
poll=${TPU_VM_POLL_SECONDS:-30}
worker='bash txl_jax/launch/tpu_worker.sh'
scratch=$(mktemp -d)
cloud_failed=0
trap 'stop_jobs; rm -rf "$scratch"' EXIT

parse() {
  while (($#)); do
    case $1 in
      --help | -h) usage; exit 0 ;;
      --name=* | --zone=* | --accelerator_type=* | --nfs=* | --runtime_version=* | \
        --project=* | --max_restarts=*)
        local flag=${1%%=*}
        printf -v "${flag#--}" %s "${1#*=}"
        ;;
      --spot) spot=1 ;;
      --keep) keep=1 ;;
      --delete) delete=1 ;;
      --dry_run) dry_run=1 ;;
      --) shift; training=("$@"); return ;;
      *) mistake "unknown flag '$1' (what is for the training goes after --)" ;;
    esac
    shift
  done
}

require() {  # flag, value, pattern, example
  [[ -n $2 ]] || mistake "--$1 is missing: give one, such as --$1=$4"
  [[ $2 =~ ^$3$ ]] || mistake "--$1=$2 is invalid: it looks like $4"
}

check() {
  require name "$name" '[a-z]([a-z0-9-]{0,61}[a-z0-9])?' my-run
  require zone "$zone" '[a-z]+-[a-z]+[0-9]+-[a-z]' us-west4-a
  where=(--zone="$zone" --quiet)
  [[ -z $project ]] || where+=(--project="$project")
  ((dry_run)) || command -v gcloud >/dev/null ||
    mistake "gcloud is not on PATH: install the Google Cloud SDK"
  ((delete)) && return
  require accelerator_type "$accelerator_type" 'v[0-9][a-z]*-[0-9]+' v5litepod-8
  [[ -z $nfs ]] ||
    require nfs "$nfs" '[A-Za-z0-9.-]+:(/[A-Za-z0-9._-]+)+' 10.0.0.2:/share
  require max_restarts "$max_restarts" '[0-9]+' 100
  [[ -n $runtime_version ]] || choose_runtime
  check_training
}

choose_runtime() {
  case $accelerator_type in
    v2-* | v3-* | v4-*) runtime_version=tpu-ubuntu2204-base ;;
    v5litepod-*) runtime_version=v2-alpha-tpuv5-lite ;;
    v5p-*) runtime_version=v2-alpha-tpuv5 ;;
    v6e-*) runtime_version=v2-alpha-tpuv6e ;;
    *) mistake "no image is known for $accelerator_type: give --runtime_version" ;;
  esac
}

training_flag() {  # prints its value, given as --flag=value or --flag value
  local i value=''
  for ((i = 0; i < ${#training[@]}; i++)); do
    case ${training[i]} in
      "--$1="*) value=${training[i]#*=} ;;
      "--$1") value=${training[i + 1]-} ;;
    esac
  done
  echo "$value"
}

check_training() {
  local workdir config
  ((${#training[@]})) || mistake "after -- the training's flags are missing"
  workdir=$(training_flag workdir)
  config=$(training_flag config)
  [[ -n $workdir ]] || mistake "after -- there is no --workdir=gs://BUCKET/FOLDER"
  if [[ $workdir == gs://?* ]]; then
    :
  elif [[ $workdir == /mnt/txl/?* ]]; then
    [[ -n $nfs ]] || mistake "--workdir=$workdir is on no share: give --nfs=ADDRESS:/SHARE"
  else
    # With --keep too: a spot slice that was taken away is created again.
    ((spot)) && mistake "--workdir=$workdir is lost with a spot machine: use one on gs://"
    ((keep)) || mistake "--workdir=$workdir is deleted with the machine: use one on gs://, \
or --keep"
  fi
  [[ -z $config || -f $root/experiments/$config.py || \
    -f $root/experiments/ablations/$config.py || \
    ($config == experiments/*.py && -f $root/$config) ]] ||
    mistake "--config=$config is no experiment of $root: put it into experiments/"
}

cloud() {  # shows and runs a gcloud command that changes something
  { printf '+ gcloud'; printf ' %q' "$@"; echo; } >&"$((dry_run ? 1 : 2))"
  ((dry_run)) || gcloud "$@"
}

create() {
  local kind=()
  ((spot)) && kind=(--spot)
  cloud compute tpus queued-resources create "$name" --node-id="$name" \
    --accelerator-type="$accelerator_type" --runtime-version="$runtime_version" \
    ${kind[@]+"${kind[@]}"} "${where[@]}"
}

delete() { cloud compute tpus queued-resources delete "$name" --force "${where[@]}"; }

on_workers() {  # which, command
  cloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"
}

state_of() {  # queued-resources or tpu-vm; prints NONE where there is none
  local field='state' error=$scratch/error
  [[ $1 == tpu-vm ]] || field='state.state'
  gcloud compute tpus "$1" describe "$name" "${where[@]}" --format="value($field)" \
    2>"$error" && return
  if grep --quiet NOT_FOUND "$error"; then echo NONE; else cat "$error" >&2; echo UNKNOWN; fi
}

state() {  # prints the state of both: READY, WAITING, GONE, NONE, FAILED or UNKNOWN
  local resource node
  resource=$(state_of queued-resources)
  case $resource in
    ACTIVE) ;;
    NONE | FAILED | UNKNOWN) echo "$resource"; return ;;
    SUSPENDED) echo GONE; return ;;
    *) echo WAITING; return ;;
  esac
  node=$(state_of tpu-vm)
  case $node in
    READY | UNKNOWN) echo "$node" ;;
    PREEMPTED | TERMINATED | STOPPED | NONE) echo GONE ;;
    *) echo WAITING ;;
  esac
}

obtain() {  # returns when the slice is ready
  local now before='' failures=0
  while :; do
    now=$(state)
    [[ $now == "$before" ]] || say "$name: $now"
    before=$now
    case $now in
      READY) return ;;
      NONE) create || ((++failures < 3)) || fail 1 "$name cannot be created: see above" ;;
      GONE) delete || ((++failures < 3)) || fail 1 "$name cannot be deleted: see above" ;;
      FAILED) fail 1 "the request for $name failed: look at it with gcloud compute tpus \
queued-resources describe $name --zone=$zone, then --delete it" ;;
      UNKNOWN) ((++failures < 3)) || fail 1 "gcloud does not report the state of $name: see above" ;;
    esac
    sleep "$poll"
  done
}

patiently() {  # repeats a command that ssh may spoil; returns 75 if the slice has gone
  local tries
  for ((tries = 1; tries <= 5; tries++)); do
    "$@" && return
    case $(state) in GONE | NONE) return 75 ;; esac
    say "attempt $tries of 5 failed: $1"
    sleep "$poll"
  done
  cloud_failed=1
  return 1
}

pack() {  # the checkout and the command, so that no shell on the way reads the command
  {
    printf 'exec .venv/bin/python -m txl_jax.main'
    printf ' %q' "${training[@]}"
    echo
  } >"$scratch/train.sh"
  sed 's/^/train.sh: /' "$scratch/train.sh" >&"$((dry_run ? 1 : 2))"
  tar -czf "$scratch/txl_jax.tar.gz" --exclude=__pycache__ -C "$scratch" train.sh \
    -C "$root" setup.py pyproject.toml README.md LICENSE txl_jax experiments launch
}

set_up() {
  local mount=''
  [[ -z $nfs ]] || mount="$worker mount $nfs && "
  cloud compute tpus tpu-vm scp "$scratch/txl_jax.tar.gz" "$name:" --worker=all \
    "${where[@]}" &&
    on_workers all "mkdir -p txl_jax && tar -xzf txl_jax.tar.gz -C txl_jax && $mount$worker install"
}

start() { on_workers all "$worker start"; }

show_logs() {  # follows all workers until the training has ended on each
  local lines=+1
  until on_workers all "$worker follow $lines"; do
    case $(state) in GONE | NONE) return ;; esac
    lines=10
    sleep "$poll"
  done
}

start_job() {  # runs a command in its own process group, so that one signal reaches all
  set -m
  "$@" </dev/null &
  set +m
}

stop_jobs() {
  local job
  for job in $(jobs -p); do kill -- "-$job" 2>/dev/null || true; done
}

follow() {  # waits until the training on the first worker ends: another one may hang
  start_job show_logs
  logs=$!
  # A job as well: bash handles a signal only after a foreground command has ended.
  until start_job on_workers 0 "$worker await" && wait $!; do
    case $(state) in GONE | NONE) return 75 ;; esac
    say "the connection was lost; the training goes on"
    sleep "$poll"
  done
}

finish() { on_workers all "$worker finish" | tee "$scratch/ends"; }

train() {  # trains on a slice that is ready; returns the training's status
  local ends logs status=0
  ends=$(on_workers all "$worker status" 2>/dev/null) || true
  if [[ $ends == *"txl_jax-status running"* ]]; then
    say "$name is already training, with the flags of its start: following it"
  else
    patiently set_up && patiently start || return
  fi
  { follow && patiently finish && wait "$logs"; } || status=$?
  stop_jobs
  ((status == 0)) || return "$status"
  return "$(sed -n 's/^.*txl_jax-status //p' "$scratch/ends" | bash "$root/launch/verdict.sh")"
}

rehearse() {
  pack
  create && set_up && start && show_logs && finish
  ((keep)) || delete
}

main() {
  local status restarts=0
  parse "$@"
  check
  if ((delete)); then delete; return; fi
  if ((dry_run)); then rehearse; return; fi
  trap 'fail 130 "training continues on the slice: the same command follows it again"' INT TERM
  pack
  while :; do
    obtain
    status=0
    train || status=$?
    ((cloud_failed)) && break
    case $status in 0 | 2 | 76 | 130) break ;; esac
    ((++restarts <= max_restarts)) || break
    say "again: restart $restarts of at most $max_restarts"
    sleep "$poll"
  done
  say "the training ended with status $status"
  if ((keep)); then say "$name is still there: --delete ends its costs"; return "$status"; fi
  patiently delete || [[ $(state) == NONE ]] ||
    fail 1 "$name COULD NOT BE DELETED and costs money"
  return "$status"
}

main "$@"
