#!/usr/bin/env bash
# Chromium and two fonts for the browser tests: there already, installed with apt where that is allowed, else what to do in words.
set -euo pipefail

for name in "${KVLAB_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$name" ] && command -v "$name" >/dev/null; then exit 0; fi
done
packages="chromium fonts-dejavu-core fonts-liberation"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing $packages ..."
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # shellcheck disable=SC2086
    apt-get install -y -qq --no-install-recommends $packages >/dev/null
    command -v chromium >/dev/null && exit 0
fi
echo "The browser tests need chromium, and it can't be installed here. Do one of these, then run make test-browser again:" >&2
echo "  sudo apt-get install $packages" >&2
echo "  KVLAB_CHROMIUM=/path/to/chrome make test-browser" >&2
exit 2
