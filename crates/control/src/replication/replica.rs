//! What this node hands to programs that embed the limiter and follow it (`tollgate-sdk`, feature `control`): its state, a
//! dump of its quotas, and what has changed among them. All but the changes come from memory.

use crate::control_plane::ControlPlane;
use crate::db::deadline::with_read_timeout;
use crate::emergency::store::replicated;
use crate::error::ControlError;
use crate::quota::list::MAX_CHANGES;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tollgate_replica::{DumpHeader, DumpWriter, QuotaChanges, ReplicaState, ReplicatedRules, STATE_VERSION};

impl ControlPlane {
    /// Returns what changes whenever the state does, but for its rules: of this process, so that another node's state
    /// is read as a whole.
    #[must_use]
    pub fn replica_version(&self) -> String {
        let generation = self.snapshot_generation.load(Ordering::Relaxed);
        format!("{}.{}.{generation}", self.instance, self.revision())
    }

    /// Returns the state, with the secret that API keys are hashed with: only for who may have it.
    #[must_use]
    pub fn replica_state(&self, rules: ReplicatedRules) -> ReplicaState {
        // The revision is read before the quotas that it is about.
        let revision = self.revision();
        ReplicaState {
            version: STATE_VERSION,
            installation: self.installation_id(),
            key_secret: ReplicaState::encode_secret(&self.secret),
            revision,
            quotas: self.quota_table.digest(),
            rules,
            measures: self.cached_emergencies().iter().map(replicated).collect(),
            grants: self.quota_table.grants().all(),
        }
    }

    /// Returns a dump of all quotas.
    #[must_use]
    pub fn dump_quotas(&self) -> DumpWriter {
        // Changes made meanwhile may be included or not: they are newer than the recorded revision, and will be read
        // again. The time is read first, because it must not be later than that of the revision.
        let current_at = self.current_at.load(Ordering::Relaxed);
        let header = DumpHeader::new(self.installation_id(), self.revision(), current_at);
        DumpWriter::new(Arc::clone(&self.quota_table), header)
    }

    /// Returns the changes of quotas after a control revision, a page at most.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn quota_changes(&self, after: i64) -> Result<QuotaChanges, ControlError> {
        // What this node knows is in the database; what is newer arrives with the next state.
        let known = self.revision();
        let quotas = with_read_timeout(self.changes(after)).await?;
        let more = i64::try_from(quotas.len()).unwrap_or(i64::MAX) >= MAX_CHANGES;
        let last = quotas.last().map_or(after, |change| change.revision);
        Ok(QuotaChanges { through: if more { last } else { last.max(known) }, more, quotas })
    }
}
