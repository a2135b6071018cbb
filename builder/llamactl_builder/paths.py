"""Where the builder's files live: the patch set it reads and the cache it fills."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

PACKAGE_DIR = Path(__file__).resolve().parent


def cache_dir() -> Path:
    """The cache, created private: $LLAMACTL_CACHE_DIR, else the user's cache directory."""
    chosen = os.environ.get("LLAMACTL_CACHE_DIR")
    path = Path(chosen) if chosen else platformdirs.user_cache_path("llamactl")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.resolve()


def patches_dir() -> Path:
    """The patch set: $LLAMACTL_PATCHES_DIR, else the checkout's, else the installed package's."""
    if chosen := os.environ.get("LLAMACTL_PATCHES_DIR"):
        return Path(chosen).resolve()
    checkout = PACKAGE_DIR.parents[1] / "patches"
    return checkout if (checkout / "upstream.toml").is_file() else PACKAGE_DIR / "patches"
