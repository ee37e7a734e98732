//! What a process knows of its control plane: quotas, grants, emergency measures and rules, in memory, and the forms in
//! which they travel. `tollgate-control` fills it from a database, `tollgate-sdk` from a server. Nothing here does I/O
//! but for the files of a snapshot.
//!
//! | module | contents |
//! |---|---|
//! | `key_hash`, `pseudonym` | keyed hashes of what identifies callers |
//! | `terms`, `overrides` | the terms of a quota, as they are replicated |
//! | `quota_table`, `lookup`, `grant_table` | [`QuotaTable`]: all quotas and grants in memory, for the limiter |
//! | `digest` | a digest of a quota table, by which two of them are compared |
//! | `dump` | a whole quota table as a stream of bytes |
//! | `measure` | an emergency measure as it is replicated |
//! | `state` | [`ReplicaState`], everything but the quotas; [`QuotaChanges`], what has changed among those |
//! | `hot` | counters that a process of the fleet has found hot |
//! | `snapshot_file` | files that are replaced as a whole |

mod digest;
mod dump;
mod grant_table;
mod hot;
mod key_hash;
mod lookup;
mod measure;
mod overrides;
pub mod pseudonym;
mod quota_table;
pub mod snapshot_file;
mod state;
mod terms;

pub use dump::{DumpError, DumpHeader, DumpReader, DumpWriter};
pub use grant_table::{GrantTable, ReplicatedGrant};
pub use hot::{CounterHasher, HOT_LIFETIME, HotNames, HotReport, HotTable, MAX_HOT};
pub use key_hash::{
    CallerRef, KeyHash, KeyHasher, MAX_KEY_BYTES, MAX_PREFIX, MAX_SHOWN, Subject, network, prefix, shown,
};
pub use lookup::MAX_LENGTHS;
pub use measure::ReplicatedMeasure;
pub use overrides::QuotaOverride;
pub use quota_table::{QuotaTable, TableDigest};
pub use state::{
    MAX_STALENESS_MS, QuotaChanges, ReplicaState, ReplicatedOptions, ReplicatedRuleFile, ReplicatedRules,
    STATE_VERSION, StateError,
};
pub use terms::{PriorReplicatedTerms, ReplicatedQuota, ReplicatedTerms};
