//! Apps behind the middleware of the clients in other languages, one process for each. Each ends when its standard input does,
//! which is with the test.

use crate::doors::Door;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

type App = OnceLock<Option<(SocketAddr, Child)>>;

static PYTHON: App = OnceLock::new();
static TYPESCRIPT: App = OnceLock::new();
static GO: App = OnceLock::new();

/// Returns the address of the app of a client; `None` for other doors, and where the language is not installed.
pub(crate) fn address(door: Door) -> Option<SocketAddr> {
    let (app, start): (&App, fn() -> Option<Command>) = match door {
        Door::Python => (&PYTHON, python),
        Door::TypeScript => (&TYPESCRIPT, typescript),
        Door::Go => (&GO, go),
        _ => return None,
    };
    app.get_or_init(|| run(start()?)).as_ref().map(|(address, _)| *address)
}

fn folder(path: &str) -> String {
    format!("{}/../../{path}", env!("CARGO_MANIFEST_DIR"))
}

fn run(mut command: Command) -> Option<(SocketAddr, Child)> {
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().ok()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take()?).read_line(&mut line).ok()?;
    let port = line.trim().parse().ok()?;
    Some((SocketAddr::from((Ipv4Addr::LOCALHOST, port)), child))
}

fn is_enabled() -> bool {
    cfg!(feature = "external-tests")
}

fn python() -> Option<Command> {
    let program = std::env::var("TOLLGATE_TEST_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let mut command = Command::new(program);
    command.arg(folder("crates/tollgate/tests/matrix/apps/app.py"));
    command.env("PYTHONPATH", folder("clients/python/src")).env("PYTHONDONTWRITEBYTECODE", "1");
    is_enabled().then_some(command)
}

/// Needs the client as `npm run build` builds it, in the folder that a variable names: `make matrix` builds it first.
fn typescript() -> Option<Command> {
    let client = std::env::var("TOLLGATE_TEST_TYPESCRIPT").ok()?;
    let mut command = Command::new("node");
    command.arg(folder("crates/tollgate/tests/matrix/apps/app.mjs")).arg(&client);
    (is_enabled() && Path::new(&client).join("dist/esm/index.js").exists()).then_some(command)
}

fn go() -> Option<Command> {
    let module = std::env::temp_dir().join(format!("tollgate-matrix-go-{}", std::process::id()));
    std::fs::create_dir_all(&module).ok()?;
    std::fs::copy(folder("crates/tollgate/tests/matrix/apps/go/main.go"), module.join("main.go")).ok()?;
    let client = std::fs::canonicalize(folder("clients/go")).ok()?;
    let text = format!(
        "module matrix\ngo 1.23\nrequire tollgate.dev/client v0.0.0\nreplace tollgate.dev/client => {}\n",
        client.display()
    );
    std::fs::write(module.join("go.mod"), text).ok()?;
    let program = module.join("matrix");
    let mut build = Command::new("go");
    build.current_dir(&module).env("GOPROXY", "off").env("GOTOOLCHAIN", "local");
    let is_built =
        is_enabled() && build.args(["build", "-o", "matrix", "."]).status().is_ok_and(|end| end.success());
    is_built.then(|| Command::new(program))
}
