"""Build hook: compiles the native library into the package, if a compiler is there. Without one the package is the same,
runs its PyTorch path, and says so."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs ``outrider/native/build.py`` by its path: the package's dependencies are not there while it is built."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for wheels and editable installs; a source distribution carries the sources only."""
        if self.target_name != "wheel":
            return
        heads = Path(self.root) / "heads"
        if version != "editable" and heads.is_dir():
            build_data["force_include"][str(heads)] = "outrider/heads"
        folder = Path(self.root) / "src" / "outrider" / "native"
        spec = importlib.util.spec_from_file_location("outrider_native_build", folder / "build.py")
        assert spec is not None and spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        library = folder / "lib" / build.library_name()
        try:
            if not library.is_file():
                for old in folder.glob("lib/*.so"):
                    old.unlink()
                build.build(library)
        except (build.BuildError, OSError) as error:
            print(f"outrider: no native library ({error}); the PyTorch path will run", file=sys.stderr)
            return
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"][str(library)] = f"outrider/native/lib/{library.name}"
