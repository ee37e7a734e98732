//! Rules as revisions: what acts, what was published when and why; check, publish, approve, go back.

use super::routes::{Asked, Reply, Route, whole};
use super::{problem, query};
use crate::http::problem::Problem;
use crate::http::{body, json_answer, typed};
use hyper::{Method, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tollgate_control::{
    Acting, ControlError, Proposal, Publication, Refusal, Report, Role, RuleFile, RuleRevision,
};

const ALL: &str = "/admin/v1/rules";

/// Many rules take a while to compile and to rehearse.
const PATIENCE: Duration = Duration::from_secs(60);
/// The most that all files of a revision may have, as JSON.
const LARGEST: usize = 8 << 20;
/// Revisions in a page.
const PAGE: i64 = 100;

pub(super) const ROUTES: &[Route] = &[
    Route::new(Method::GET, ALL, Role::Viewer, |asked| Box::pin(list(asked))),
    Route::new(Method::POST, ALL, Role::Operator, |asked| Box::pin(publish(asked))).patient(PATIENCE),
    Route::new(Method::GET, "/admin/v1/rules/current", Role::Viewer, |asked| Box::pin(current(asked))),
    Route::new(Method::GET, "/admin/v1/rules/schema", Role::Viewer, |asked| Box::pin(schema(asked))),
    Route::new(Method::POST, "/admin/v1/rules/check", Role::Viewer, |asked| Box::pin(check(asked)))
        .patient(PATIENCE),
    Route::new(Method::GET, "/admin/v1/rules/{rev}", Role::Viewer, |asked| Box::pin(one(asked))),
    Route::new(Method::POST, "/admin/v1/rules/{rev}/approve", Role::Operator, |asked| {
        Box::pin(approve(asked))
    }),
    Route::new(Method::POST, "/admin/v1/rules/{rev}/rollback", Role::Operator, |asked| {
        Box::pin(roll_back(asked))
    }),
];

async fn list(asked: Asked) -> Result<Reply, Problem> {
    let [before] = query::words(&asked.head.uri, ["before"])?;
    let before = before.map(|before| number(&before).map_err(|wrong| wrong.at("before"))).transpose()?;
    let revisions = asked.admin.control()?.rule_revisions(before, PAGE).await.map_err(problem)?;
    let full = i64::try_from(revisions.len()).is_ok_and(|length| length == PAGE);
    let next = revisions.last().map(|last| last.rev).filter(|rev| full && *rev > 1);
    let acting = asked.admin.desk()?.acting();
    let names: Vec<&str> = acting.files.iter().map(|file| file.name.as_str()).collect();
    let active = json!({
        "rev": acting.rev(), "revision": acting.rules.revision(), "source": acting.source(), "files": names,
    });
    Ok(told(StatusCode::OK, &json!({"active": active, "revisions": revisions, "next_before": next})))
}

async fn current(asked: Asked) -> Result<Reply, Problem> {
    let acting = asked.admin.desk()?.acting();
    let Acting { rules, files, published } = &*acting;
    let mut body = json!({"rev": null, "revision": rules.revision()});
    if let Some(published) = published {
        body = json!(published);
    }
    body["source"] = acting.source().into();
    body["files"] = json!(files);
    Ok(told(StatusCode::OK, &body))
}

async fn schema(_: Asked) -> Result<Reply, Problem> {
    Ok(whole(typed(StatusCode::OK, "application/schema+json", tollgate_rules::schema().to_owned())))
}

async fn one(asked: Asked) -> Result<Reply, Problem> {
    let rev = number(&asked.named[0])?;
    let found = asked.admin.control()?.rule_revision(rev).await.map_err(problem)?;
    let found = found.ok_or(ControlError::Unknown("revision with this number")).map_err(problem)?;
    Ok(told(StatusCode::OK, &json!(found)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Candidate {
    files: Vec<RuleFile>,
}

async fn check(asked: Asked) -> Result<Reply, Problem> {
    let sent = body::read_within(asked.body, LARGEST).await?;
    let sent: Candidate = body::decode(&sent)?;
    let report = asked.admin.desk()?.check(sent.files).await;
    Ok(report.map_or_else(refused, |report| told(StatusCode::OK, &json!(report))))
}

async fn publish(asked: Asked) -> Result<Reply, Problem> {
    let sent = body::read_within(asked.body, LARGEST).await?;
    let sent: Proposal = body::decode(&sent)?;
    let (admin, actor) = (asked.admin, asked.actor);
    // On its own: who hangs up in the middle must not leave a revision that is written and does not act here.
    let desk = Arc::clone(admin.desk()?);
    let publishing = tokio::spawn(async move { desk.publish(sent, &actor).await });
    let (status, rev, report) = match finished(publishing.await)? {
        Err(refusal) => return Ok(refused(refusal)),
        Ok(Publication::Acts(rev, report)) => (StatusCode::CREATED, rev, report),
        Ok(Publication::Waits(rev, report)) => (StatusCode::ACCEPTED, rev, report),
        Ok(Publication::Same(rev, report)) => (StatusCode::OK, rev, report),
    };
    revision(admin.control()?, status, rev, Some(&report)).await
}

async fn approve(asked: Asked) -> Result<Reply, Problem> {
    let rev = number(&asked.named[0])?;
    let (admin, actor) = (asked.admin, asked.actor);
    let desk = Arc::clone(admin.desk()?);
    let approving = tokio::spawn(async move { desk.approve(rev, &actor).await });
    match finished(approving.await)? {
        Err(ControlError::OwnWork) => return Err(own_work()),
        Err(ControlError::Changed) => {
            let detail = "something else acts by now than when it was published: publish it again";
            return Err(Problem::new(StatusCode::PRECONDITION_FAILED, "Changed meanwhile", detail));
        }
        other => other.map_err(problem)?,
    }
    revision(admin.control()?, StatusCode::OK, rev, None).await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Why {
    reason: String,
}

async fn roll_back(asked: Asked) -> Result<Reply, Problem> {
    let to = number(&asked.named[0])?;
    let sent = body::read(asked.body).await?;
    let Why { reason } = body::decode(&sent)?;
    let (admin, actor) = (asked.admin, asked.actor);
    let desk = Arc::clone(admin.desk()?);
    let going = tokio::spawn(async move { desk.roll_back(to, &reason, &actor).await });
    match finished(going.await)? {
        Err(refusal) => Ok(refused(refusal)),
        Ok(rev) => revision(admin.control()?, StatusCode::CREATED, rev, None).await,
    }
}

/// A revision as it is told after something was done to it, without its text.
async fn revision(
    control: &tollgate_control::Control,
    status: StatusCode,
    rev: i64,
    report: Option<&Report>,
) -> Result<Reply, Problem> {
    let found: Option<RuleRevision> =
        control.rule_revisions(Some(rev + 1), 1).await.map_err(problem)?.into_iter().next();
    let mut body = json!(found);
    if let (Some(body), Some(Value::Object(report))) =
        (body.as_object_mut(), report.map(|report| json!(report)))
    {
        body.extend(report);
    }
    Ok(told(status, &body))
}

fn finished<T>(done: Result<T, tokio::task::JoinError>) -> Result<T, Problem> {
    done.map_err(|error| problem(ControlError::Broken(error.to_string())))
}

fn own_work() -> Problem {
    let detail = "whoever published it cannot approve of it. Another person must, with a token of their own: `tollgate \
                  token create --name THEIR-NAME --role operator`. Before the first token is made there is only one \
                  identity, `loopback`";
    Problem::new(StatusCode::FORBIDDEN, "Needs another person", detail)
}

/// What speaks against it, as problem+json with more to read.
fn refused(refusal: Refusal) -> Reply {
    let (status, title, detail, more) = match refusal {
        Refusal::Control(error) => return whole(problem(error).into_answer()),
        Refusal::Malformed(place, why) => {
            return whole(Problem::bad(why).at(place).into_answer());
        }
        Refusal::Wrong(report) => {
            let first = report.errors.first();
            let place = first.map(|first| format!("{}:{}:{}", first.file, first.line, first.column));
            let detail = first.map(|first| first.message.clone()).unwrap_or_default();
            let more = json!({"place": place, "errors": report.errors});
            (StatusCode::UNPROCESSABLE_ENTITY, "The rules cannot act", detail, more)
        }
        Refusal::NeedsConfirm(report) => {
            let share =
                report.rehearsal.as_ref().map_or(0.0, |rehearsal| rehearsal.newly_denied_share) * 100.0;
            let detail = format!(
                "{share:.1}% of the last requests would be newly denied; if that is meant, send it again with \
                 `confirm: true`"
            );
            (StatusCode::CONFLICT, "It would deny much", detail, json!(report))
        }
        Refusal::FromFiles => {
            let detail = "this node takes its rules from files (--rules-from files): change those".to_owned();
            (StatusCode::CONFLICT, "Rules come from files", detail, Value::Null)
        }
        Refusal::Changed(acting) => {
            let acts = acting.map_or("the rule files act".to_owned(), |rev| format!("revision {rev} acts"));
            let detail = format!("{acts} by now: look at it, and publish again");
            (StatusCode::PRECONDITION_FAILED, "Changed meanwhile", detail, json!({"active_rev": acting}))
        }
    };
    let mut body =
        json!({"type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail});
    if let (Some(body), Value::Object(more)) = (body.as_object_mut(), more) {
        body.extend(more);
    }
    whole(typed(status, "application/problem+json", body.to_string()))
}

fn told(status: StatusCode, body: &Value) -> Reply {
    whole(json_answer(status, format!("{body:#}\n").into_bytes()))
}

fn number(text: &str) -> Result<i64, Problem> {
    let wrong = || Problem::bad("write the number of a revision, such as 3").at("rev");
    text.parse().ok().filter(|number| (1..i64::MAX).contains(number)).ok_or_else(wrong)
}
