"""Limits of Flask-Limiter whose counters are on a Tollgate server, shared by every process of the app.

    pip install tollgate-client[limits] flask-limiter
    tollgate serve --rules examples/python &
    flask --app examples/python/flask_app.py run
"""

import os

import tollgate.limits  # noqa: F401 - registers tollgate://
from flask import Flask
from flask_limiter import Limiter
from flask_limiter.util import get_remote_address

app = Flask(__name__)
limiter = Limiter(
    get_remote_address,
    app=app,
    storage_uri=os.environ.get("TOLLGATE_STORAGE", "tollgate://127.0.0.1:8080"),
    strategy="moving-window",
    headers_enabled=True,
)


@app.route("/")
@limiter.limit("3/minute")
def index() -> str:
    return "welcome"
