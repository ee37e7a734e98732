//! Who may do what, and what they did.

use crate::{draft, open, rules, somebody};
use serde_json::json;
use tollgate_control::{AuditVerification, ControlError, Db, Precondition, Role, TokenCheck};
use tollgate_core::TimeDelta;

pub(crate) async fn tokens_prove_who_asks_until_they_are_revoked(address: String) {
    let (control, clock) = open(&address).await;
    assert!(!control.has_tokens().await.expect("an answer"));
    let made = control.create_token("ada", Role::Operator, None, &somebody()).await.expect("a token");
    let brief = control
        .create_token("bob", Role::Viewer, Some(TimeDelta::from_secs(60)), &somebody())
        .await
        .expect("a token");
    for _ in 0..2 {
        let who = control.authenticate(&made.secret).await.expect("an answer").expect("somebody");
        assert_eq!((who.name.as_str(), who.role), ("ada", Role::Operator));
    }
    let mut forged = made.secret.clone();
    let last = forged.pop().expect("a character");
    forged.push(if last == 'A' { 'B' } else { 'A' });
    let mixed = format!("{}{}", &made.secret[..20], &brief.secret[20..]);
    for wrong in ["", "tg_", "tg__", &forged, &mixed, &made.secret[..40], &format!("{}x", made.secret)] {
        assert_eq!(control.authenticate(wrong).await.expect("an answer"), None, "{wrong}");
    }
    assert_eq!(
        control.authenticate(&brief.secret).await.expect("an answer").expect("somebody").role,
        Role::Viewer
    );
    clock.advance(TimeDelta::from_secs(60));
    assert_eq!(control.authenticate(&brief.secret).await.expect("an answer"), None, "it has expired");
    // Revoked by another process: acts here at once.
    let (other, _) = open(&address).await;
    other.revoke_token(&made.id, &somebody()).await.expect("a token");
    assert_eq!(control.authenticate(&made.secret).await.expect("an answer"), None, "it is revoked");
    let again = other.revoke_token(&made.id, &somebody()).await;
    assert!(matches!(again, Err(ControlError::NotFound(_))), "{again:?}");
    let listed = serde_json::to_string(&control.tokens().await.expect("a list")).expect("JSON");
    assert!(listed.contains("ada") && listed.contains("bob"), "{listed}");
    assert!(!listed.contains(&made.secret[20..]), "{listed}");
    assert!(
        control.had_tokens().await.expect("an answer") && !control.has_tokens().await.expect("an answer")
    );
}

/// Right and wrong tokens are told apart at a look, and yet nothing but the proof lets anybody in.
pub(crate) async fn a_look_tells_right_tokens_from_wrong_ones(address: String) {
    let (control, clock) = open(&address).await;
    let made = control.create_token("ada", Role::Operator, None, &somebody()).await.expect("a token");
    let (minute, me) = (Some(TimeDelta::from_secs(60)), somebody());
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
    assert!(matches!(claim(&brief.secret).await, TokenCheck::Expired), "its holder is no guesser");

    // A token of before digests were kept: proven once, it is told at a look.
    let db = Db::open(&address).await.expect("a database");
    let forget = "UPDATE tokens SET digest = NULL";
    execute(&db, forget, forget).await.expect("an alteration");
    assert!(matches!(claim(&made.secret).await, TokenCheck::Unverified(_)));
    assert!(matches!(claim(&forged).await, TokenCheck::Unverified(_)));
    assert_eq!(control.authenticate(&forged).await.expect("an answer"), None);
    assert!(
        matches!(claim(&made.secret).await, TokenCheck::Unverified(_)),
        "a wrong one leaves nothing behind"
    );
    assert_eq!(control.authenticate(&made.secret).await.expect("an answer").expect("somebody").name, "ada");
    assert!(matches!(claim(&made.secret).await, TokenCheck::Valid(_)));
    assert!(matches!(claim(&forged).await, TokenCheck::Invalid));

    // Who can write to the table and puts the digest of their own token there is not let in as somebody else.
    let mine = control.create_token("eve", Role::Viewer, None, &somebody()).await.expect("a token");
    let swap = "UPDATE tokens SET digest = (SELECT digest FROM tokens AS own WHERE own.name = 'eve') WHERE name = 'ada'";
    execute(&db, swap, swap).await.expect("an alteration");
    let posing = format!("{}{}", &made.secret[..20], &mine.secret[20..]);
    assert_eq!(control.authenticate(&posing).await.expect("an answer"), None);
}

async fn execute(db: &Db, sqlite: &'static str, postgres: &'static str) -> Result<(), sqlx::Error> {
    match db {
        Db::Sqlite { write: pool, .. } => sqlx::raw_sql(sqlite).execute(pool).await.map(|_| ()),
        Db::Postgres(pool) => sqlx::raw_sql(postgres).execute(pool).await.map(|_| ()),
    }
}

pub(crate) async fn the_audit_chain_shows_what_was_tampered_with(address: String) {
    let (control, _) = open(&address).await;
    for i in 0..5 {
        let sent = draft(&json!({"tier": "pro", "reason": i.to_string()}));
        let put = control.put_quota("key", sent, &rules(), Precondition::Any, &somebody()).await;
        put.expect("a database").expect("a quota");
    }
    control.delete_quota("key", Precondition::Any, &somebody()).await.expect("a deletion");
    let entries = control.audit(None, 100).await.expect("entries");
    assert_eq!(entries.iter().map(|entry| entry.seq).collect::<Vec<_>>(), [6, 5, 4, 3, 2, 1]);
    assert_eq!((entries[0].action.as_str(), entries[0].actor.as_str()), ("quota.delete", "ada"));
    assert_eq!(entries[0].before, entries[1].after);
    assert_eq!(control.audit(Some(3), 1).await.expect("entries")[0].seq, 2);
    let verify = async || control.verify_audit().await.expect("an answer");
    assert!(matches!(verify().await, AuditVerification::Intact { entries: 6, .. }));
    // Nobody changes it by accident.
    let db = Db::open(&address).await.expect("a database");
    let alter = "UPDATE audit SET actor = 'eve' WHERE seq = 3";
    execute(&db, alter, alter).await.expect_err("it is only ever added to");
    let remove = "DELETE FROM audit";
    execute(&db, remove, remove).await.expect_err("it is only ever added to");
    // Who takes the guard away is found out.
    execute(
        &db,
        "DROP TRIGGER audit_no_update; DROP TRIGGER audit_no_delete",
        "DROP TRIGGER audit_only_grows ON audit",
    )
    .await
    .expect("the guard is gone");
    execute(&db, alter, alter).await.expect("an alteration");
    assert!(matches!(verify().await, AuditVerification::Broken { seq: 3, .. }));
    let mend = "UPDATE audit SET actor = 'ada' WHERE seq = 3";
    execute(&db, mend, mend).await.expect("an alteration");
    assert!(matches!(verify().await, AuditVerification::Intact { .. }));
    let cut = "DELETE FROM audit WHERE seq = 6";
    execute(&db, cut, cut).await.expect("a deletion");
    assert!(matches!(verify().await, AuditVerification::Broken { seq: 6, .. }));
}
