//! Tokens, roles and the audit log.

use crate::{draft, open, operator, rules};
use serde_json::json;
use tollgate_control::{AuditFilter, AuditVerification, ControlError, Db, Precondition, Role, TokenCheck};
use tollgate_core::TimeDelta;

pub(crate) async fn tokens_authenticate_until_they_are_revoked(address: String) {
    let (control, clock) = open(&address).await;
    assert!(!control.has_tokens().await.expect("an answer"));
    let made = control.create_token("ada", Role::Operator, None, &operator()).await.expect("a token");
    let brief = control
        .create_token("bob", Role::Viewer, Some(TimeDelta::from_secs(60)), &operator())
        .await
        .expect("a token");
    for _ in 0..2 {
        let principal = control.authenticate(&made.secret).await.expect("an answer").expect("a principal");
        assert_eq!((principal.name.as_str(), principal.role), ("ada", Role::Operator));
    }
    let mut forged = made.secret.clone();
    let last = forged.pop().expect("a character");
    forged.push(if last == 'A' { 'B' } else { 'A' });
    let mixed = format!("{}{}", &made.secret[..20], &brief.secret[20..]);
    for wrong in ["", "tg_", "tg__", &forged, &mixed, &made.secret[..40], &format!("{}x", made.secret)] {
        assert_eq!(control.authenticate(wrong).await.expect("an answer"), None, "{wrong}");
    }
    assert_eq!(
        control.authenticate(&brief.secret).await.expect("an answer").expect("a principal").role,
        Role::Viewer
    );
    clock.advance(TimeDelta::from_secs(60));
    assert_eq!(control.authenticate(&brief.secret).await.expect("an answer"), None, "expired");
    // Revoked by another process: takes effect here immediately.
    let (other, _) = open(&address).await;
    other.revoke_token(&made.id, &operator()).await.expect("a token");
    assert_eq!(control.authenticate(&made.secret).await.expect("an answer"), None, "revoked");
    let again = other.revoke_token(&made.id, &operator()).await;
    assert!(matches!(again, Err(ControlError::NotFound(_))), "{again:?}");
    let listed = serde_json::to_string(&control.tokens().await.expect("a list")).expect("JSON");
    assert!(listed.contains("ada") && listed.contains("bob"), "{listed}");
    assert!(!listed.contains(&made.secret[20..]), "{listed}");
    assert!(
        control.had_tokens().await.expect("an answer") && !control.has_tokens().await.expect("an answer")
    );
}

/// The cheap check distinguishes valid tokens from wrong ones, but only verification grants access.
pub(crate) async fn the_precheck_recognizes_wrong_tokens(address: String) {
    let (control, clock) = open(&address).await;
    let made = control.create_token("ada", Role::Operator, None, &operator()).await.expect("a token");
    let (minute, me) = (Some(TimeDelta::from_secs(60)), operator());
    let brief = control.create_token("bob", Role::Viewer, minute, &me).await.expect("a token");
    let claim = async |token: &str| control.precheck_token(token).await.expect("an answer");
    let forged = format!("{}{}", &made.secret[..20], &brief.secret[20..]);
    assert!(matches!(claim(&made.secret).await, TokenCheck::Valid(_)));
    for wrong in [
        &forged,
        &made.secret.replace("tg_", "tg_0"),
        &format!("tg_{}_{}", "0".repeat(16), &made.secret[20..]),
    ] {
        assert!(matches!(claim(wrong).await, TokenCheck::Invalid), "{wrong}");
    }
    clock.advance(TimeDelta::from_secs(60));
    assert!(matches!(claim(&brief.secret).await, TokenCheck::Expired), "an expired token is not a wrong one");

    // A token from before digests were stored: after one verification, the cheap check recognizes it.
    let db = Db::open(&address).await.expect("a database");
    let forget = "UPDATE tokens SET digest = NULL";
    execute(&db, forget, forget).await.expect("an alteration");
    assert!(matches!(claim(&made.secret).await, TokenCheck::Unverified(_)));
    assert!(matches!(claim(&forged).await, TokenCheck::Unverified(_)));
    assert_eq!(control.authenticate(&forged).await.expect("an answer"), None);
    assert!(matches!(claim(&made.secret).await, TokenCheck::Unverified(_)), "a wrong token stores no digest");
    assert_eq!(
        control.authenticate(&made.secret).await.expect("an answer").expect("a principal").name,
        "ada"
    );
    assert!(matches!(claim(&made.secret).await, TokenCheck::Valid(_)));
    assert!(matches!(claim(&forged).await, TokenCheck::Invalid));

    // An attacker who can write to the table and inserts the digest of their own token gains no access as another
    // principal.
    let mine = control.create_token("eve", Role::Viewer, None, &operator()).await.expect("a token");
    let swap = "UPDATE tokens SET digest = (SELECT digest FROM tokens AS own WHERE own.name = 'eve') WHERE name = 'ada'";
    execute(&db, swap, swap).await.expect("an alteration");
    let posing = format!("{}{}", &made.secret[..20], &mine.secret[20..]);
    assert_eq!(control.authenticate(&posing).await.expect("an answer"), None);
}

pub(crate) async fn execute(
    db: &Db,
    sqlite: &'static str,
    postgres: &'static str,
) -> Result<(), sqlx::Error> {
    match db {
        Db::Sqlite { write: pool, .. } => sqlx::raw_sql(sqlite).execute(pool).await.map(|_| ()),
        Db::Postgres(pool) => sqlx::raw_sql(postgres).execute(pool).await.map(|_| ()),
    }
}

pub(crate) async fn the_audit_chain_reveals_tampering(address: String) {
    let (control, _) = open(&address).await;
    for i in 0..5 {
        let sent = draft(&json!({"tier": "pro", "reason": i.to_string()}));
        let put = control.put_quota("key", sent, &rules(), Precondition::Any, &operator()).await;
        put.expect("a database").expect("a quota");
    }
    control.delete_quota("key", Precondition::Any, &operator()).await.expect("a deletion");
    let entries = control.audit(None, 100).await.expect("entries");
    assert_eq!(entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [6, 5, 4, 3, 2, 1]);
    assert_eq!((entries[0].action.as_str(), entries[0].actor.as_str()), ("quota.delete", "ada"));
    assert_eq!(entries[0].before, entries[1].after);
    assert_eq!(control.audit(Some(3), 1).await.expect("entries")[0].seq, 2);
    let verify = async || control.verify_audit().await.expect("an answer");
    assert!(matches!(verify().await, AuditVerification::Intact { entries: 6, .. }));
    // Triggers prevent accidental changes.
    let db = Db::open(&address).await.expect("a database");
    let alter = "UPDATE audit SET actor = 'eve' WHERE seq = 3";
    execute(&db, alter, alter).await.expect_err("the audit log is append-only");
    let remove = "DELETE FROM audit";
    execute(&db, remove, remove).await.expect_err("the audit log is append-only");
    // Tampering after removing the triggers is detected.
    execute(
        &db,
        "DROP TRIGGER audit_no_update; DROP TRIGGER audit_no_delete",
        "DROP TRIGGER audit_only_grows ON audit",
    )
    .await
    .expect("the triggers are dropped");
    execute(&db, alter, alter).await.expect("an alteration");
    assert!(matches!(verify().await, AuditVerification::Broken { seq: 3, .. }));
    let mend = "UPDATE audit SET actor = 'ada' WHERE seq = 3";
    execute(&db, mend, mend).await.expect("an alteration");
    assert!(matches!(verify().await, AuditVerification::Intact { .. }));
    let cut = "DELETE FROM audit WHERE seq = 6";
    execute(&db, cut, cut).await.expect("a deletion");
    assert!(matches!(verify().await, AuditVerification::Broken { seq: 6, .. }));
}

/// Without filters, an operator would page through a year of changes to find one.
pub(crate) async fn the_audit_log_is_filtered(address: String) {
    let (control, clock) = open(&address).await;
    let bob = tollgate_control::Actor { name: "bob".to_owned(), origin: "127.0.0.1".to_owned() };
    let first = control.create_token("one", Role::Viewer, None, &operator()).await.expect("a token");
    clock.advance(TimeDelta::from_secs(10));
    control.create_token("two", Role::Viewer, None, &bob).await.expect("a token");
    clock.advance(TimeDelta::from_secs(10));
    control.revoke_token(&first.id, &bob).await.expect("a token");
    let found = async |filter: AuditFilter, before: Option<i64>, limit: i64| -> Vec<i64> {
        let page = control.audit_matching(&filter, before, limit).await.expect("entries");
        page.iter().map(|entry| entry.seq).collect()
    };
    let text = |text: &str| Some(text.to_owned());
    let all = AuditFilter::default();
    assert_eq!(found(all.clone(), None, 10).await, [3, 2, 1]);
    assert_eq!(found(AuditFilter { actor: text("bob"), ..all.clone() }, None, 10).await, [3, 2]);
    assert_eq!(found(AuditFilter { actor: text("bob"), ..all.clone() }, Some(3), 10).await, [2]);
    assert_eq!(found(AuditFilter { action: text("token"), ..all.clone() }, None, 2).await, [3, 2]);
    assert_eq!(found(AuditFilter { action: text("token.create"), ..all.clone() }, None, 10).await, [2, 1]);
    assert_eq!(found(AuditFilter { action: text("tok"), ..all.clone() }, None, 10).await, [] as [i64; 0]);
    assert_eq!(found(AuditFilter { target: text(&first.id[..5]), ..all.clone() }, None, 10).await, [3, 1]);
    let start = i64::try_from(crate::START * 1_000).expect("a time");
    let within = AuditFilter { from: Some(start + 5_000), to: Some(start + 15_000), ..all };
    assert_eq!(found(within, None, 10).await, [2]);
}
