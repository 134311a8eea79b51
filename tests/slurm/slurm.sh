#!/bin/bash
# A real SLURM of several nodes on one machine (Debian 12: slurm-wlm 22.05.8). Needs root.
#
#   slurm.sh install            apt-get install -y slurm-wlm munge (about 12 s to a minute); 77 if that cannot be done
#   slurm.sh up [N] [DIR]       munged, slurmctld and N (4) slurmd n1…nN, all on 127.0.0.1; waits until all are idle (about 3 s)
#   slurm.sh env                prints what to `eval` in a shell that uses sbatch, srun, squeue … (SLURM_CONF)
#   slurm.sh kill-node I        SIGKILL the slurmd of node i (not its steps);  slurm.sh start-node I brings it back
#   slurm.sh logs               the ends of all logs
#   slurm.sh down               cancel all jobs, end the daemons by their own pids, remove DIR
#
# With NETWORK=10.77.0 nodes are hosts of their own (tests/hosts/network.py): n1…nN are named h1…hN and have the addresses
# 10.77.0.1 and up, ON_1…ON_N are the commands that run another one there, and slurmctld is at 10.77.0.254.
set -u
PATH=$PATH:/usr/sbin:/sbin  # of a plain user's shell they are not
MARK=/run/odyssey-slurm
DIR=$(cat "$MARK" 2>/dev/null || echo /tmp/odyssey-slurm); NETWORK=${NETWORK:-}; HOST=$(hostname -s)

install() {
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v munged >/dev/null && return 0
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null || exit 77
}
conf() {
    local n=$1 ctl nodes i
    if [ "$NETWORK" ]; then
        ctl="$HOST($NETWORK.254)"
        nodes=$(for i in $(seq "$n"); do echo "NodeName=n$i NodeHostname=h$i NodeAddr=$NETWORK.$i Port=17000 CPUs=2 RealMemory=4000 State=UNKNOWN"; done)
    else
        ctl="$HOST(127.0.0.1)"
        nodes="NodeName=n[1-$n] NodeHostname=$HOST NodeAddr=127.0.0.1 Port=[17001-$((17000 + n))] CPUs=2 RealMemory=4000 State=UNKNOWN"
    fi
    cat > "$DIR/slurm.conf" <<EOF
ClusterName=t
SlurmctldHost=$ctl
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/munge.socket
SlurmctldPort=16817
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/ctld.pid
SlurmdPidFile=$DIR/%n.pid
SlurmctldLogFile=$DIR/log/ctld.log
SlurmdLogFile=$DIR/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
SlurmctldTimeout=10
InactiveLimit=0
KillWait=5
MinJobAge=300
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$nodes
PartitionName=p Nodes=n[1-$n] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=6
PartitionName=urgent Nodes=n[1-$n] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off
EOF
}
start_node() {
    local on=ON_$1
    SLURM_CONF=$DIR/slurm.conf eval "${!on:-} slurmd -N n$1 -f $DIR/slurm.conf"
}
up() {
    local n=${1:-4} i began=$SECONDS
    down
    DIR=${2:-/tmp/odyssey-slurm}; mkdir -p "$DIR"/{state,log,munge,spool}; echo "$DIR" > "$MARK"
    for i in $(seq "$n"); do mkdir -p "$DIR/spool/n$i"; done
    chown munge "$DIR/munge"; chmod 755 "$DIR" "$DIR/munge"
    [ -f /etc/munge/munge.key ] || mungekey --create --force 2>/dev/null || { dd if=/dev/urandom of=/etc/munge/munge.key bs=1 count=1024 2>/dev/null; chown munge /etc/munge/munge.key; chmod 400 /etc/munge/munge.key; }
    runuser -u munge -- /usr/sbin/munged --force --socket="$DIR/munge/munge.socket" --pid-file="$DIR/munge/munged.pid" --log-file="$DIR/munge/munged.log" --seed-file="$DIR/munge/seed" || exit 77
    conf "$n"
    slurmctld -f "$DIR/slurm.conf" || exit 77
    for i in $(seq "$n"); do start_node "$i" || exit 77; done
    export SLURM_CONF=$DIR/slurm.conf
    for i in $(seq 100); do
        [ "$(sinfo -h -N -p p -t idle -o %N 2>/dev/null | sort -u | wc -l)" = "$n" ] && { echo "up: $n nodes in $((SECONDS - began)) s; export SLURM_CONF=$SLURM_CONF"; return 0; }
        sleep 0.3
    done
    echo "nodes did not become idle" >&2; sinfo -R >&2; logs >&2; exit 1
}
logs() { for f in "$DIR"/log/*.log "$DIR"/munge/munged.log; do echo "== $f"; tail -n "${1:-15}" "$f"; done; }
stop_pid() { [ -f "$1" ] && kill "-${2:-TERM}" "$(cat "$1")" 2>/dev/null; return 0; }
runs() { [ -n "$1" ] && [ -d "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
stop_all() {  # by pid: TERM, up to 5 s, KILL
    local p i
    for p in "$@"; do kill -TERM "$p" 2>/dev/null; done
    for i in $(seq 50); do
        for p in "$@"; do runs "$p" && { sleep 0.1; continue 2; }; done
        return 0
    done
    for p in "$@"; do runs "$p" && kill -KILL "$p" 2>/dev/null; done
}
down() {
    [ -f "$MARK" ] || return 0
    export SLURM_CONF=$DIR/slurm.conf
    local daemons p
    daemons=$(cat "$DIR"/n*.pid "$DIR/ctld.pid" 2>/dev/null)
    timeout 5 scancel -u root 2>/dev/null; sleep 0.5; timeout 5 scancel --signal=KILL -u root 2>/dev/null; sleep 0.5
    stop_all $daemons
    for p in /proc/[0-9]*; do   # steps of ours that are left
        { tr '\0' ' ' < "$p/cmdline"; } 2>/dev/null | grep -q '^slurmstepd' && grep -qz "SLURM_CONF=$DIR/slurm.conf" "$p/environ" 2>/dev/null && kill -KILL "${p#/proc/}" 2>/dev/null
    done
    stop_all $(cat "$DIR/munge/munged.pid" 2>/dev/null)
    rm -rf "$DIR" "$MARK"
}
c=${1:?see the head of this file}; shift
case $c in
    install) install ;; up) install; up "$@" ;; env) echo "export SLURM_CONF=$DIR/slurm.conf" ;;
    kill-node) stop_pid "$DIR/n$1.pid" KILL ;; start-node) start_node "$1" ;; logs) logs "$@" ;; down) down ;;
    *) sed -n '2,16p' "$0"; exit 2 ;;
esac
