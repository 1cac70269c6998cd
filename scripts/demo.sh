#!/bin/sh
# The demo: a fresh project in .demo/, one example pack published, one run. `demo.sh dev` opens the UI on it.
# The models of the pack are offline stand-ins: no network, no API key.
set -eu
cd "$(dirname "$0")/.."
root=$(pwd)

export DAGSTER_HOME="$root/.demo"
export DAGSTER_DISABLE_TELEMETRY=yes
unset AGENTMESH_DATABASE_URL AGENTMESH_PROJECT AGENTMESH_DAGSTER_URL

if [ -t 1 ]; then bold=$(printf '\033[1m') plain=$(printf '\033[0m'); else bold='' plain=''; fi
step() { printf '\n%s%s%s\n' "$bold" "\$ $*" "$plain"; "$@"; }

start() {
    rm -rf "$DAGSTER_HOME"
    mkdir -p "$DAGSTER_HOME"
    step agentmesh import packs/support_triage --publish
}

if [ "${1:-}" = dev ]; then
    [ -e "$DAGSTER_HOME/agentmesh.db" ] || start
    exec agentmesh dev
fi

start
step agentmesh run workflow support-triage --input @packs/support_triage/inputs/ticket.json

cat <<END

The run is in Dagster's history as the job support_triage. To see it in Dagster's UI:

    make dev

or, without make:

    DAGSTER_HOME=$DAGSTER_HOME $(command -v agentmesh) dev
END
