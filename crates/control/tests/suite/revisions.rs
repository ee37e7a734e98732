//! Rule revisions: none is lost, one is active, and concurrent changes are not overwritten.

use crate::{open, operator};
use std::sync::Arc;
use tollgate_control::{Actor, ControlError, ControlPlane, NewRevision, RevisionStatus, RuleFile};

fn files(count: u64) -> Vec<RuleFile> {
    let text = format!("{{domain: d, descriptors: [{{key: api_key, limit: {count}/hour}}]}}");
    vec![RuleFile { name: "d.yaml".to_owned(), text }]
}

fn draft(count: u64, base_rev: Option<i64>) -> NewRevision {
    NewRevision {
        files: files(count),
        hash: format!("hash of {count}"),
        reason: format!("{count} it is"),
        base_rev,
        first: Some((files(0), "hash of the files".to_owned())),
        needs_approval: false,
    }
}

async fn statuses(node: &ControlPlane) -> Vec<(i64, RevisionStatus)> {
    let all = node.rule_revisions(None, 100).await.expect("an answer");
    all.into_iter().map(|one| (one.rev, one.status)).collect()
}

pub(crate) async fn every_revision_is_kept_and_one_is_active(address: String) {
    use RevisionStatus::{Active, RolledBack, Superseded};
    let (one, _) = open(&address).await;
    let (two, _) = open(&address).await;
    assert_eq!(one.published(), None);
    // The first publication stores the previously active files too.
    assert_eq!(one.publish_rules(draft(5, None), &operator()).await.expect("published"), 2);
    assert_eq!(one.publish_rules(draft(7, Some(2)), &operator()).await.expect("published"), 3);
    assert_eq!(statuses(&one).await, [(3, Active), (2, Superseded), (1, Superseded)]);
    let late = two.publish_rules(draft(9, Some(2)), &operator()).await;
    assert!(matches!(late, Err(ControlError::Conflict)), "{late:?}");
    two.catch_up().await.expect("an answer");
    let known = two.published().expect("what the other has published");
    assert_eq!((known.revision.rev, &known.files), (3, &files(7)));
    assert_eq!((known.revision.author.as_str(), known.revision.reason.as_str()), ("ada", "7 it is"));

    let back = two.roll_back_rules(1, None, "it was better", &operator()).await.expect("a rollback");
    assert_eq!(two.published().expect("the rules").files, files(0));
    assert_eq!(statuses(&two).await[..2], [(back, Active), (3, RolledBack)]);
    let rolled_back = two.rule_revision(3).await.expect("an answer").expect("still there");
    assert_eq!(rolled_back.revision.rolled_back_because.as_deref(), Some("it was better"));
    assert_eq!(rolled_back.files, files(7));
    let missing = two.roll_back_rules(99, None, "typo", &operator()).await;
    assert!(matches!(missing, Err(ControlError::NotFound(_))), "{missing:?}");
    // A node that starts later knows the active revision.
    assert_eq!(open(&address).await.0.published().map(|known| known.revision.rev), Some(back));
    let whole = one.verify_audit().await.expect("an answer");
    assert!(matches!(whole, tollgate_control::AuditVerification::Intact { entries: 3, .. }), "{whole:?}");
}

/// Several nodes see the same denial spike: one rolls back, and the others do not roll back again.
pub(crate) async fn one_of_several_rollbacks_succeeds(address: String) {
    let mut nodes = Vec::new();
    for _ in 0..4 {
        nodes.push(open(&address).await.0);
    }
    nodes[0].publish_rules(draft(5, None), &operator()).await.expect("published");
    nodes[0].publish_rules(draft(7, Some(2)), &operator()).await.expect("published");
    let rollbacks: Vec<_> = nodes
        .iter()
        .map(|node| {
            let node = Arc::clone(node);
            tokio::spawn(
                async move { node.roll_back_rules(2, Some(3), "trouble", &operator()).await.is_ok() },
            )
        })
        .collect();
    let mut done = 0;
    for one in rollbacks {
        done += usize::from(one.await.expect("a node"));
    }
    assert_eq!((done, statuses(&nodes[0]).await[0]), (1, (4, RevisionStatus::Active)));
}

pub(crate) async fn approval_needs_another_operator(address: String) {
    use RevisionStatus::{Active, PendingApproval, Rejected, Superseded};
    let (node, _) = open(&address).await;
    let pending = |count, base| NewRevision { needs_approval: true, ..draft(count, base) };
    let rev = node.publish_rules(pending(5, None), &operator()).await.expect("published");
    assert_eq!((rev, node.published()), (2, None), "it is pending, and the files stay active");
    let own = node.approve_rules(rev, &operator()).await;
    assert!(matches!(own, Err(ControlError::SelfApproval)), "{own:?}");
    assert_no_rollback(&node, rev, "pending_approval").await;
    assert_eq!(node.published(), None, "it is still pending");
    let other = Actor { name: "bob".to_owned(), origin: "::1".to_owned() };
    node.approve_rules(rev, &other).await.expect("approved");
    let active = node.published().expect("it is active").revision.clone();
    assert_eq!((active.rev, active.approved_by.as_deref(), active.base_rev), (2, Some("bob"), Some(1)));
    let twice = node.approve_rules(rev, &other).await;
    assert!(matches!(twice, Err(ControlError::NotFound(_))), "{twice:?}");

    // A superseded pending revision cannot be approved afterwards.
    let late = node.publish_rules(pending(6, Some(2)), &operator()).await.expect("published");
    assert_eq!(statuses(&node).await[0], (late, PendingApproval));
    node.publish_rules(draft(7, Some(2)), &operator()).await.expect("published");
    assert_eq!(statuses(&node).await[..3], [(4, Active), (3, Rejected), (2, Superseded)]);
    assert!(node.approve_rules(late, &other).await.is_err());
    assert_no_rollback(&node, late, "rejected").await;
    // A revision that was approved and active can be rolled back to.
    node.roll_back_rules(2, None, "it was better", &operator()).await.expect("a rollback");
}

/// Asserts that a rollback cannot bypass the approval.
async fn assert_no_rollback(node: &ControlPlane, rev: i64, expected: &str) {
    for only_if in [None, node.published().map(|active| active.revision.rev)] {
        let rolled_back = node.roll_back_rules(rev, only_if, "around", &operator()).await;
        let Err(ControlError::NeverActive { rev: found, status }) = rolled_back else {
            panic!("{rolled_back:?}")
        };
        assert_eq!((found, status), (rev, expected));
    }
}
