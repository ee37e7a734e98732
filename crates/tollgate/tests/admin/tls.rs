//! The admin address over TLS: with certificates that openssl made, asked by curl and by the command line.

use crate::databases::Place;
use crate::harness::Node;
use crate::harness::{Folder, Server, eventually, run, run_with};
use crate::{RULES, node};
use serde_json::{Value, json};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

fn openssl(folder: &Folder, args: &[&str]) {
    let done = Command::new("openssl").args(args).current_dir(folder.path()).output().expect("openssl runs");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// An authority that is its own, and certificates of it: `NAME.pem` and `NAME.key`.
fn authority(folder: &Folder, name: &str) {
    let (key, cert, subject) = (format!("{name}.key"), format!("{name}.pem"), format!("/CN={name}"));
    let args =
        ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"];
    openssl(folder, &[&args[..], &["-keyout", &key, "-out", &cert, "-subj", &subject]].concat());
}

fn certificate(folder: &Folder, authority: &str, name: &str, names: &str) {
    let (key, cert, request) = (format!("{name}.key"), format!("{name}.pem"), format!("{name}.csr"));
    let (ca, ca_key, subject) =
        (format!("{authority}.pem"), format!("{authority}.key"), format!("/CN={name}"));
    let args = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
    openssl(folder, &[&args[..], &["-keyout", &key, "-out", &request, "-subj", &subject]].concat());
    folder.write("ext", format!("subjectAltName={names}\n"));
    let args = ["x509", "-req", "-days", "2", "-CAcreateserial", "-extfile", "ext"];
    openssl(folder, &[&args[..], &["-in", &request, "-out", &cert, "-CA", &ca, "-CAkey", &ca_key]].concat());
}

/// The status and the body that curl got; no status, if it got no answer.
fn curl(folder: &Folder, args: &[&str]) -> (String, String) {
    let done = Command::new("curl")
        .args(["-s", "-m", "30", "-w", "\n%{http_code}"])
        .args(args)
        .current_dir(folder.path())
        .output()
        .expect("curl runs");
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let (body, status) = text.rsplit_once('\n').expect("a status");
    (status.to_owned(), body.to_owned())
}

#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs openssl and curl: make test")]
fn certificates_identify_server_and_client() {
    let place = Place::new();
    let db = place.sqlite("tls");
    let folder = Folder::new();
    authority(&folder, "ca");
    authority(&folder, "stranger");
    certificate(&folder, "ca", "server", "DNS:localhost,IP:127.0.0.1");
    certificate(&folder, "ca", "otto", "DNS:otto,URI:spiffe://corp/otto");
    certificate(&folder, "ca", "vera", "URI:spiffe://corp/vera");
    certificate(&folder, "ca", "nobody", "DNS:nobody");
    certificate(&folder, "stranger", "mallory", "DNS:otto");
    folder.write("rules.yaml", RULES);
    std::fs::copy(folder.join("ca.pem"), folder.join("operators.pem")).expect("a copy");
    let settings = format!(
        "rules: [rules.yaml]\ndb: {db}\nadmin: 127.0.0.1:0\nhttp: 127.0.0.1:0\ngrpc: 127.0.0.1:0\n\
         admin_tls_cert: server.pem\nadmin_tls_key: server.key\nadmin_client_ca: operators.pem\n\
         admin_roles: {{otto: operator, 'spiffe://corp/vera': viewer}}\n"
    );
    let config = folder.write("tollgate.yaml", settings);
    let node =
        Node::from(Server::start(&["--config", config.to_str().expect("a plain path")]), Folder::new());
    let quota = format!("https://localhost:{}/admin/v1/quotas/k", node.admin.port());
    let ask = |certificate: Option<&str>, method: &str| {
        let (cert, key) =
            (format!("{}.pem", certificate.unwrap_or("")), format!("{}.key", certificate.unwrap_or("")));
        let shown = ["--cert", &cert, "--key", &key];
        let own = certificate.map_or(&[][..], |_| &shown[..]);
        let args = ["--cacert", "ca.pem", "-X", method, "-d", r#"{"tier": "pro"}"#, &quota];
        curl(&folder, &[&args[..], own].concat())
    };
    assert_eq!(ask(None, "PUT").0, "401", "also on loopback, where certificates are asked for");
    assert_eq!(ask(Some("otto"), "PUT").0, "200");
    assert_eq!(ask(Some("vera"), "PUT").0, "403", "a viewer");
    assert_eq!(ask(Some("vera"), "GET").0, "200");
    let (status, body) = ask(Some("nobody"), "GET");
    assert!(status == "403" && body.contains("admin_roles"), "{status} {body}");
    assert_eq!(ask(Some("mallory"), "GET").0, "000", "another authority's word is worth nothing");
    assert_eq!(
        curl(&folder, &[&quota]).0,
        "000",
        "a client that does not trust the authority does not connect"
    );
    let plain = format!("http://localhost:{}/healthz", node.admin.port());
    assert_eq!(curl(&folder, &[&plain]).0, "000", "nothing is answered in the clear");
    let (_, head) =
        curl(&folder, &["--cacert", "ca.pem", "-i", &quota.replace("admin/v1/quotas/k", "healthz")]);
    for name in
        ["strict-transport-security:", "x-content-type-options: nosniff", "referrer-policy: no-referrer"]
    {
        assert!(head.to_ascii_lowercase().contains(name), "{name} is not in {head}");
    }

    // The command line, by certificate and by token; and who it was stands in the audit log.
    let url = format!("https://127.0.0.1:{}", node.admin.port());
    let path = |name: &str| folder.join(name).to_str().expect("a plain path").to_owned();
    let (ca, cert, key) = (path("ca.pem"), path("otto.pem"), path("otto.key"));
    let by_certificate =
        run(&["quota", "get", "k", "--admin", &url, "--ca", &ca, "--cert", &cert, "--cert-key", &key]);
    assert_eq!(by_certificate.code, Some(0), "{}", by_certificate.err);
    let made = run(&["token", "create", "--db", &db, "--name", "ada", "--role", "admin"]);
    let by_token =
        run_with(&["quota", "list", "--admin", &url, "--ca", &ca], &[("TOLLGATE_TOKEN", made.out.trim())]);
    assert_eq!(by_token.code, Some(0), "{}", by_token.err);
    let audit = run(&["audit", "export", "--db", &db]);
    let first: Value = serde_json::from_str(audit.out.lines().next().expect("an entry")).expect("JSON");
    assert_eq!((&first["actor"], &first["action"]), (&"otto".into(), &"quota.put".into()));

    // Other authorities of operators act without a restart; a file that says nothing changes nothing.
    folder.write("operators.pem", "nothing");
    eventually("a word about it", || node.server.log().contains("client CA reload failed").then_some(()));
    assert_eq!(ask(Some("otto"), "GET").0, "200");
    std::fs::copy(folder.join("stranger.pem"), folder.join("operators.pem")).expect("a copy");
    eventually("the other authority", || (ask(Some("mallory"), "GET").0 == "200").then_some(()));
    assert_eq!(ask(Some("otto"), "GET").0, "000", "the first authority's word is worth nothing now");

    // A new certificate acts without a restart: one of the other authority, so that it can be distinguished.
    certificate(&folder, "stranger", "server", "DNS:localhost");
    let health = format!("https://localhost:{}/healthz", node.admin.port());
    eventually("the new certificate", || {
        (curl(&folder, &["--cacert", "stranger.pem", &health]).0 == "200").then_some(())
    });
}

#[test]
fn settings_that_do_not_fit_are_refused() {
    let folder = Folder::new();
    let db = format!("sqlite:{}", folder.join("x.db").display());
    let config = folder.write("roles.yaml", "admin_roles: {otto: operator}\n");
    let config = config.to_str().expect("a plain path");
    let wrong = folder.write("wrong.yaml", "admin_roles: {otto: king}\n");
    let wrong = wrong.to_str().expect("a plain path");
    for (args, says) in [
        (vec!["--admin-tls-cert", "x.pem"], "must be set together"),
        (vec!["--admin-client-ca", "x.pem"], "requires --admin-tls-cert"),
        (vec!["--admin-tls-cert", "nowhere.pem", "--admin-tls-key", "nowhere.key"], "nowhere.pem"),
        (vec!["--config", config], "admin_roles"),
        (vec!["--config", wrong], "unknown role `king`"),
    ] {
        let base = [
            "serve",
            "--db",
            &db,
            "--admin",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--grpc",
            "127.0.0.1:0",
        ];
        let refused = run(&[&base[..], &["--resp", "off"], &args].concat());
        assert!(refused.code == Some(1) && refused.err.contains(says), "{args:?}: {}", refused.err);
    }
}

/// A client that guesses tokens is slowed down; one with a valid token is not, although the node has never seen it and it comes from the same
/// address.
#[test]
fn wrong_tokens_do_not_lock_out_others() {
    let place = Place::new();
    let db = place.sqlite("attempts");
    let node = node(&db);
    let token = |name: &str| {
        let made = run(&["token", "create", "--db", &db, "--name", name, "--role", "admin"]);
        format!("Bearer {}", made.out.trim())
    };
    let (mut forged, fresh) = (token("ada"), ["bea", "cyd", "dan"].map(token));
    let last = if forged.ends_with('A') { "B" } else { "A" };
    forged.replace_range(forged.len() - 1.., last);
    let ask =
        |token: &str| node.ask("GET", "/admin/v1/quotas", &[("authorization", token)], &Value::Null).status;
    let (turned_away, enough) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let forge = || {
            while !enough.load(Ordering::Relaxed) {
                match ask(&forged) {
                    401 => {}
                    429 => turned_away.store(true, Ordering::Relaxed),
                    other => panic!("{other} for a wrong token"),
                }
            }
        };
        let trying: Vec<_> = (0..8).map(|_| scope.spawn(forge)).collect();
        eventually("more than may wait at once", || turned_away.load(Ordering::Relaxed).then_some(()));
        let statuses = fresh.each_ref().map(|token| ask(token));
        let log_in = json!({"token": fresh[0].trim_start_matches("Bearer ")});
        let in_browser = node.ask("POST", "/admin/v1/session", &[], &log_in).status;
        enough.store(true, Ordering::Relaxed);
        trying.into_iter().for_each(|one| one.join().expect("wrong tokens are refused"));
        assert_eq!((statuses, in_browser), ([200; 3], 204), "right ones never wait for wrong ones");
    });
    assert_eq!(ask(&forged), 401);
}
