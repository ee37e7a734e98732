//! Decodes usage reports and encodes actions, with limits on everything that a client can send.

use super::assignment::Assignment;
use super::table::{Action, Bucket};
use crate::rls::BadRequest;
use crate::rls::codec::Readable;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_response::BucketAction;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_response::bucket_action::{
    AbandonAction, BucketAction as Kind, QuotaAssignmentAction,
};
use crate::rls::proto::envoy::service::rate_limit_quota::v3::{BucketId, RateLimitQuotaUsageReports};
use crate::rls::proto::envoy::r#type::v3::rate_limit_strategy::{BlanketRule, Strategy};
use crate::rls::proto::envoy::r#type::v3::{RateLimitStrategy, TokenBucket};
use prost_types::Duration;
use std::sync::Arc;

const MAX_ENTRIES: usize = 64;
const MAX_TEXT: usize = 1024;

impl Readable for RateLimitQuotaUsageReports {}
const MAX_DOMAIN: usize = 1024;

/// Returns the domain of a message: the first of a stream must have one, and later ones the same or none.
pub(super) fn domain(
    message: &RateLimitQuotaUsageReports,
    known: Option<&Arc<str>>,
) -> Result<Arc<str>, BadRequest> {
    match known {
        Some(known) if message.domain.is_empty() || message.domain == **known => Ok(Arc::clone(known)),
        Some(_) => Err(BadRequest("domain: must not change on a stream; open another one".to_owned())),
        None if message.domain.is_empty() => {
            Err(BadRequest("domain: must not be empty in the first report of a stream".to_owned()))
        }
        None if message.domain.len() > MAX_DOMAIN => {
            Err(BadRequest(format!("domain: at most {MAX_DOMAIN} bytes")))
        }
        None => Ok(Arc::from(message.domain.as_str())),
    }
}

/// What a message reports of one bucket.
#[derive(Clone, Debug)]
pub(super) struct Usage {
    pub(super) bucket: Bucket,
    pub(super) allowed: u64,
    pub(super) denied: u64,
}

/// Returns the reports of a message. `time_elapsed` is not read: Envoy cuts it to whole seconds, and sends zero at first.
pub(super) fn usages(
    message: RateLimitQuotaUsageReports,
    domain: &Arc<str>,
) -> Result<Vec<Usage>, BadRequest> {
    let usages = message.bucket_quota_usages.into_iter().enumerate();
    let report = |(at, usage): (usize, crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_usage_reports::BucketQuotaUsage)| {
        let bad = |message: &str| Err(BadRequest(format!("bucket_quota_usages[{at}].{message}")));
        let Some(BucketId { bucket }) = usage.bucket_id else { return bad("bucket_id: is missing") };
        if bucket.is_empty() || bucket.len() > MAX_ENTRIES {
            return bad(&format!("bucket_id: send 1 to {MAX_ENTRIES} entries"));
        }
        if bucket.iter().any(|(key, value)| key.is_empty() || key.len().max(value.len()) > MAX_TEXT) {
            return bad(&format!("bucket_id: keys of 1 to {MAX_TEXT} bytes, values of at most {MAX_TEXT}"));
        }
        let mut entries: Vec<(String, String)> = bucket.into_iter().collect();
        entries.sort_unstable();
        let bucket = Bucket { domain: Arc::clone(domain), entries: entries.into_boxed_slice() };
        Ok(Usage { bucket, allowed: usage.num_requests_allowed, denied: usage.num_requests_denied })
    };
    usages.map(report).collect()
}

/// Returns the wire form of an action.
pub(super) fn action(bucket: &Bucket, action: Action) -> BucketAction {
    let kind = match action {
        Action::Abandon => Kind::AbandonAction(AbandonAction {}),
        Action::Assign(assignment, ttl) => Kind::QuotaAssignmentAction(QuotaAssignmentAction {
            assignment_time_to_live: Some(seconds(ttl.max(1))),
            rate_limit_strategy: Some(RateLimitStrategy { strategy: Some(strategy(assignment)) }),
        }),
    };
    let bucket_id = BucketId { bucket: bucket.entries.iter().cloned().collect() };
    BucketAction { bucket_id: Some(bucket_id), bucket_action: Some(kind) }
}

fn strategy(assignment: Assignment) -> Strategy {
    match assignment {
        Assignment::AllowAll => Strategy::BlanketRule(BlanketRule::AllowAll.into()),
        Assignment::DenyAll => Strategy::BlanketRule(BlanketRule::DenyAll.into()),
        Assignment::Tokens(tokens) => Strategy::TokenBucket(TokenBucket {
            max_tokens: tokens.max,
            tokens_per_fill: Some(tokens.tokens),
            fill_interval: Some(seconds(u64::from(tokens.interval))),
        }),
    }
}

fn seconds(seconds: u64) -> Duration {
    Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}
