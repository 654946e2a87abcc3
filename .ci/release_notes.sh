#!/bin/sh
# The section of CHANGELOG.md about a version, which must be that of pyproject.toml. Usage: release_notes.sh 0.2.0
set -eu
cd "$(dirname "$0")/.."
known=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
[ "$1" = "$known" ] || { echo "the tag says $1, and pyproject.toml $known: set its version, and tag again" >&2; exit 1; }
notes=$(awk -v version="$1" '/^## / { on = $2 == version; next } on' CHANGELOG.md)
[ -n "$notes" ] || { echo "CHANGELOG.md has no section '## $1': rename Unreleased" >&2; exit 1; }
printf '%s\n' "$notes"
