//! Decodes usage reports and encodes actions, with limits on everything that a client can send.

use super::assignment::Assignment;
use super::table::{Action, Bucket};
use crate::rls::BadRequest;
use crate::rls::codec::Readable;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_response::BucketAction;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_response::bucket_action::{
    AbandonAction, BucketAction as Kind, QuotaAssignmentAction,
};
use crate::rls::proto::envoy::service::rate_limit_quota::v3::rate_limit_quota_usage_reports::BucketQuotaUsage;
use crate::rls::proto::envoy::service::rate_limit_quota::v3::{BucketId, RateLimitQuotaUsageReports};
use crate::rls::proto::envoy::r#type::v3::rate_limit_strategy::{BlanketRule, Strategy};
use crate::rls::proto::envoy::r#type::v3::{RateLimitStrategy, TokenBucket};
use bytes::Bytes;
use prost::Message;
use prost_types::Duration;
use std::sync::Arc;

const MAX_ENTRIES: usize = 64;
const MAX_TEXT: usize = 1024;

const MAX_DOMAIN: usize = 1024;

/// A [`RateLimitQuotaUsageReports`] whose buckets are not read yet.
#[derive(Clone, PartialEq, Message)]
struct RawReports {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(bytes = "bytes", repeated, tag = "2")]
    usages: Vec<Bytes>,
}

impl Readable for RateLimitQuotaUsageReports {
    /// Reads each bucket for itself. Envoy copies header fields into buckets as they are, so a caller can make one that is not
    /// UTF-8: that one alone becomes a bucket without an identifier.
    fn repair(message: Bytes) -> Option<Self> {
        let RawReports { domain, usages } = RawReports::decode(message).ok()?;
        let usages = usages.into_iter().map(|usage| BucketQuotaUsage::decode(usage).unwrap_or_default());
        Some(Self { domain, bucket_quota_usages: usages.collect() })
    }
}

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

/// Returns the reports of a message, and the number of buckets that cannot be used: they are left out, because callers choose
/// their values, and all other buckets must not depend on one. `time_elapsed` is not read: Envoy cuts it to whole seconds, and
/// sends zero at first.
pub(super) fn usages(message: RateLimitQuotaUsageReports, domain: &Arc<str>) -> (Vec<Usage>, u64) {
    let all = message.bucket_quota_usages.len();
    let valid = message.bucket_quota_usages.into_iter().filter_map(|usage| {
        let BucketId { bucket } = usage.bucket_id?;
        let is_valid = (1..=MAX_ENTRIES).contains(&bucket.len())
            && bucket.iter().all(|(key, value)| !key.is_empty() && key.len().max(value.len()) <= MAX_TEXT);
        is_valid.then(|| {
            let mut entries: Vec<(String, String)> = bucket.into_iter().collect();
            entries.sort_unstable();
            let bucket = Bucket { domain: Arc::clone(domain), entries: entries.into_boxed_slice() };
            Usage { bucket, allowed: usage.num_requests_allowed, denied: usage.num_requests_denied }
        })
    });
    let valid: Vec<Usage> = valid.collect();
    let invalid = (all - valid.len()) as u64;
    (valid, invalid)
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
