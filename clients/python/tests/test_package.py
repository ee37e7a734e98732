"""The wheel: built, installed into an empty environment, and used in three lines."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from servers import Tollgate

ROOT = pathlib.Path(__file__).parents[1]
PROGRAM = """
from tollgate import Client
limiter = Client({url!r}, domain="test", timeout_ms=5_000)
print(limiter.limit("key-1").allowed)
"""


class PackageTest(unittest.TestCase):
    def test_a_wheel_installs_and_works_in_three_lines(self):
        with tempfile.TemporaryDirectory() as directory, Tollgate() as server:
            path = pathlib.Path(directory)
            run = lambda *command: subprocess.run(command, check=True, capture_output=True, text=True, cwd=path).stdout
            # The wheel is built from the source distribution, so both are complete.
            run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(path), str(ROOT))
            (wheel,), (_,) = path.glob("*.whl"), path.glob("*.tar.gz")
            run(sys.executable, "-m", "venv", "--without-pip", "empty")
            python = str(path / "empty" / "bin" / "python")
            run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", str(wheel))
            self.assertEqual(run(python, "-c", PROGRAM.format(url=server.url)).strip(), "True")
            names = run(python, "-m", "zipfile", "-l", str(wheel))
            self.assertIn("tollgate/py.typed", names)
            # Modules for libraries that are absent do not hinder the others.
            imports = "import tollgate.asgi, tollgate.wsgi, importlib.util as u; print(u.find_spec('limits'))"
            self.assertEqual(run(python, "-c", imports).strip(), "None")


if __name__ == "__main__":
    unittest.main()
