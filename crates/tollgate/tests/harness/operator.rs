//! A client of a node's admin address, over HTTP and by the command line.

use super::{Node, WebResponse};
use serde_json::{Value, json};

pub(crate) struct Operator(Node);

impl std::ops::Deref for Operator {
    type Target = Node;
    fn deref(&self) -> &Node {
        &self.0
    }
}

impl std::ops::DerefMut for Operator {
    fn deref_mut(&mut self) -> &mut Node {
        &mut self.0
    }
}

impl Operator {
    /// Of a node with these rules and this database, and flags beside them.
    pub(crate) fn start(rules: &str, db: &str, flags: &[&str]) -> Self {
        Self(Node::start(rules, db, flags))
    }

    pub(crate) fn ask(&self, method: &str, path: &str, body: &Value) -> WebResponse {
        self.0.ask(method, path, &[], body)
    }

    pub(crate) fn get(&self, path: &str) -> Value {
        let answer = self.ask("GET", path, &Value::Null);
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    }

    /// Sends what must be accepted.
    pub(crate) fn post(&self, path: &str, body: &Value) -> Value {
        let answer = self.ask("POST", path, body);
        assert!(matches!(answer.status, 200 | 201), "{path}: {}", answer.text());
        answer.json()
    }

    /// Decides something in an emergency; its id.
    pub(crate) fn declare(&self, action: &str, kind: &str, value: &str) -> String {
        let target = json!({"kind": kind, "value": value});
        let sent = json!({"action": action, "target": target, "reason": "test"});
        self.post("/admin/v1/emergency", &sent)["id"].as_str().expect("an id").to_owned()
    }

    /// The command line, asking this node.
    pub(crate) fn run(&self, args: &[&str]) -> super::Run {
        let url = format!("http://{}", self.admin);
        super::run_with(args, &[("TOLLGATE_ADMIN_URL", &url)])
    }

    /// How many requests in a row pass, up to fifty.
    pub(crate) fn passes(&self, attributes: &Value) -> usize {
        (0..50).take_while(|_| self.server.check("d", attributes).status == 200).count()
    }
}
