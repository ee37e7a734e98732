"""The examples of the documentation run, and print what the page says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from servers import Tollgate

ROOT = pathlib.Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "python"
PROGRAM = "import flask_app; client = flask_app.app.test_client(); print([client.get('/').status_code for _ in range(4)])"


class ExampleTest(unittest.TestCase):
    def test_the_examples(self):
        with Tollgate({file.name: file.read_text() for file in EXAMPLE.glob("*.yaml")}) as server:
            environment = {
                **os.environ,
                "PYTHONPATH": f"{ROOT / 'clients/python/src'}:{EXAMPLE}",
                "PYTHONDONTWRITEBYTECODE": "1",
                "TOLLGATE_URL": server.url,
                "TOLLGATE_STORAGE": f"tollgate://127.0.0.1:{server.port}",
            }

            def run(*arguments):
                command = [sys.executable, *arguments]
                return subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout

            printed = run(str(EXAMPLE / "main.py"))
            self.assertEqual(printed, "plain httpx: refused\npolite httpx: not refused\ntokens used: 12\n")
            self.assertIn(printed, (ROOT / "docs/sdk/python.md").read_text())
            self.assertEqual(run("-c", PROGRAM), "[200, 200, 200, 429]\n")


if __name__ == "__main__":
    unittest.main()
