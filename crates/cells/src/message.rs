//! Messages between cells: a length, a kind, an id that a reply repeats, and a body. A pure codec; links carry the
//! bytes.
//!
//! Rolling upgrades: a message of an unknown kind is skipped and counted, and bytes after the known fields of a body
//! are ignored. A change that older cells would misread takes a new kind; [`Hello::version`] is what a cell
//! understands. JSON was rejected (a counter and tick takes at most 48 bytes), protobuf as well: the only messages with
//! a structure are limits, which have their own validation.

use crate::charge_codec::{MAX_CHARGES, SentCharge, SentCounter};
use crate::key_values::KeyValues;
use crate::wire::{Reader, Writer};
use std::sync::Arc;
use tollgate_core::{Outcomes, PermitId, Timestamp};

/// Version of the messages that this release sends.
pub const VERSION: u16 = 1;
/// Maximum bytes of a message.
pub const MAX_MESSAGE: usize = 1 << 20;
/// Maximum number of counters in one batch.
pub const MAX_BATCH: usize = 16_384;
/// Maximum number of cells in a list.
pub(crate) const MAX_CELLS: usize = 256;
const MAX_NAME: usize = 256;
/// Minimum bytes of a batch's entry: its counter, the number of its values, and its units.
const MIN_ENTRY: usize = 3;
/// Maximum bytes of a reason; what is longer is cut off.
const MAX_REASON: usize = 1_024;
/// After the reason of a failure: the sender has reached another process of the receiver's name.
const OTHER_PROCESS: u8 = b'p';
/// After the reason of a failure: a batch was not applied, and the cells that the sender has heard of follow.
const NOT_APPLIED: u8 = b'n';

/// The first message in each direction of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Newest version that the cell understands.
    pub version: u16,
    /// Name of the cell, the same for all who see it.
    pub cell: String,
    /// Region of the cell.
    pub region: String,
    /// Random number of this process: a restarted cell has another.
    pub incarnation: u64,
    /// Fingerprint of the key that secrets are hashed with. Cells with different keys would count callers apart.
    pub key_check: u64,
    /// Fingerprint of the cells that it is configured with and of their weights, for a warning if the cells disagree.
    pub cells_check: u64,
    /// Index among the cells of its region: two with the same one would have the same part of a limit.
    pub rank: u32,
    /// Microseconds without an answer after which it counts another cell as silent; `None` from a release that does not
    /// say.
    pub silence: Option<u64>,
}

/// Units that a counter has been charged in another cell since the last batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchEntry {
    /// Index among the batch's counters.
    pub counter: u32,
    /// Values of the key.
    pub values: KeyValues,
    /// Units; negative if more was refunded than charged.
    pub units: i64,
}

/// Consumption of a cell in one tick.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Number of the batch, ascending by one for each process and receiver. A receiver applies each once.
    pub sequence: u64,
    /// Scopes and limits that entries refer to.
    pub counters: Vec<SentCounter>,
    /// Consumption by counter.
    pub entries: Vec<BatchEntry>,
    /// Microseconds in which the units were consumed, by the sender's clock: zero if the batch continues the one before
    /// it. `None` from a release that does not say.
    pub covers: Option<u64>,
    /// When the batch was made, in microseconds by the sender's clock: for how long ago the units of refunds were taken. `None`
    /// from a release that does not say.
    pub made_at: Option<u64>,
    /// Number of counters that could not be read, with their entries. Not sent.
    pub skipped: usize,
}

/// What the sender says of a cell, and how long ago that was in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sighting {
    /// Name of the cell.
    pub cell: String,
    /// Milliseconds ago.
    pub age: u64,
    /// What was seen.
    pub sign: Sign,
}

/// What a cell has seen of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// It answered a request, which was sent then.
    Answered,
    /// It sent a request. Older releases do not send this, nor the next.
    Requested,
    /// It could decide what a hash gives it for the last time: the sender says so of itself.
    Able,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// First message of either side.
    Hello(Hello),
    /// Charges one request.
    Charge(Vec<SentCharge>),
    /// Charges what has already happened, or refunds.
    Debit(Vec<SentCharge>),
    /// Releases permits.
    Release(Vec<SentCharge>),
    /// Returns leased units: the charge names counter and units.
    Return {
        /// The units, as a charge.
        units: Box<SentCharge>,
        /// Time of the charge.
        taken_at: Timestamp,
        /// Time at which the bucket was due to be full.
        full_at: Timestamp,
        /// Idempotency key.
        id: PermitId,
    },
    /// Consumption; also the heartbeat. Shared with the outbox, which repeats it until it is acknowledged.
    Batch(Arc<Batch>),
    /// Reply to a charge.
    Outcomes(Outcomes),
    /// Reply to what returns nothing, with the cells that the sender has heard of.
    Done(Vec<Sighting>),
    /// Reply: the request could not be performed.
    Failed(String),
    /// Reply to a batch that was not applied: why, with the cells that the sender has heard of. Older releases read
    /// [`Self::Failed`].
    NotApplied(String, Vec<Sighting>),
    /// Reply to a first message: another process has its sender's name, and answers. Older releases read [`Self::Failed`].
    OtherProcess(String),
    /// Reply to a batch that is being applied, with the cells that the sender has heard of: it is sent again.
    Busy(Vec<Sighting>),
    /// A message of a later version, or one whose fields cannot be read.
    Unknown(u8),
}

/// What is wrong with received bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Longer than [`MAX_MESSAGE`].
    #[error("a message of {0} bytes is too long")]
    TooLong(usize),
    /// The beginning of an answer over HTTP.
    #[error("it answers over HTTP: this is not the address of a --cell")]
    Http,
    /// Not a message.
    #[error("malformed message")]
    Malformed,
}

/// Bytes of the length that precedes a message.
pub const PREFIX: usize = 4;

/// Encodes a message with its length.
#[must_use]
pub fn encode(id: u64, message: &Message) -> Vec<u8> {
    let mut out = Writer(vec![0; PREFIX]);
    let kind = match message {
        Message::Hello(_) => 1,
        Message::Charge(_) => 2,
        Message::Debit(_) => 3,
        Message::Release(_) => 4,
        Message::Return { .. } => 5,
        Message::Batch(_) => 6,
        Message::Outcomes(_) => 7,
        Message::Done(_) => 8,
        Message::Failed(_) | Message::NotApplied(..) | Message::OtherProcess(_) => 9,
        Message::Busy(_) => 10,
        Message::Unknown(kind) => *kind,
    };
    out.byte(kind);
    out.number(id);
    match message {
        Message::Hello(hello) => {
            out.number(u64::from(hello.version));
            out.text(&hello.cell);
            out.text(&hello.region);
            for number in [hello.incarnation, hello.key_check, hello.cells_check, u64::from(hello.rank)] {
                out.number(number);
            }
            if hello.silence.is_some() {
                out.maybe(hello.silence);
            }
        }
        Message::Charge(charges) | Message::Debit(charges) | Message::Release(charges) => {
            out.number(charges.len() as u64);
            charges.iter().for_each(|charge| out.charge(charge));
        }
        Message::Return { units, taken_at, full_at, id } => {
            out.charge(units);
            out.number(taken_at.as_micros());
            out.number(full_at.as_micros());
            out.wide(id.0);
        }
        Message::Batch(batch) => {
            out.number(batch.sequence);
            out.number(batch.counters.len() as u64);
            for counter in &batch.counters {
                let mut one = Writer(Vec::new());
                one.counter(counter);
                if let Some(taken) = counter.limit.refunds_of() {
                    one.number(taken.as_micros());
                }
                out.number(one.0.len() as u64);
                out.0.extend_from_slice(&one.0);
            }
            out.number(batch.entries.len() as u64);
            out.0.reserve(batch.entries.iter().map(|entry| entry.values.len() + 4).sum());
            for entry in &batch.entries {
                out.number(u64::from(entry.counter));
                out.0.extend_from_slice(entry.values.encoded());
                out.signed(entry.units);
            }
            if batch.covers.is_some() {
                out.maybe(batch.covers);
                if batch.made_at.is_some() {
                    out.maybe(batch.made_at);
                }
            }
        }
        Message::Outcomes(outcomes) => out.outcomes(outcomes),
        Message::Done(seen) | Message::Busy(seen) => out.all_sightings(seen),
        Message::Failed(why) => out.text(&why[..why.floor_char_boundary(MAX_REASON)]),
        Message::NotApplied(why, seen) => {
            out.text(&why[..why.floor_char_boundary(MAX_REASON)]);
            out.byte(NOT_APPLIED);
            out.all_sightings(seen);
        }
        Message::OtherProcess(why) => {
            out.text(&why[..why.floor_char_boundary(MAX_REASON)]);
            out.byte(OTHER_PROCESS);
        }
        Message::Unknown(_) => {}
    }
    let length = u32::try_from(out.0.len() - PREFIX).unwrap_or(u32::MAX);
    out.0[..PREFIX].copy_from_slice(&length.to_le_bytes());
    out.0
}

/// Returns the length of the message that a prefix announces.
///
/// # Errors
/// If it is too long, or no prefix.
pub fn length(prefix: [u8; PREFIX]) -> Result<usize, MessageError> {
    if &prefix == b"HTTP" {
        return Err(MessageError::Http);
    }
    let length = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
    if length > MAX_MESSAGE { Err(MessageError::TooLong(length)) } else { Ok(length) }
}

/// Decodes a message without its length.
///
/// # Errors
/// If the bytes are no message.
pub fn decode(bytes: &[u8]) -> Result<(u64, Message), MessageError> {
    if bytes.len() > MAX_MESSAGE {
        return Err(MessageError::TooLong(bytes.len()));
    }
    let mut from = Reader(bytes);
    let (Some(kind), Some(id)) = (from.byte(), from.number()) else { return Err(MessageError::Malformed) };
    body(kind, &mut from).map(|message| (id, message)).ok_or(MessageError::Malformed)
}

/// Decodes a message without its length; one whose fields cannot be read is [`Message::Unknown`], because the next
/// message begins where its length says.
///
/// # Errors
/// If the bytes have not even a kind and an id.
pub fn decode_leniently(bytes: &[u8]) -> Result<(u64, Message), MessageError> {
    decode(bytes).or_else(|error| {
        let mut from = Reader(bytes);
        let (Some(kind), Some(id)) = (from.byte(), from.number()) else { return Err(error) };
        Ok((id, Message::Unknown(kind)))
    })
}

fn body(kind: u8, from: &mut Reader<'_>) -> Option<Message> {
    Some(match kind {
        1 => Message::Hello(Hello {
            version: u16::try_from(from.number()?).ok()?,
            cell: from.text(MAX_NAME)?.to_owned(),
            region: from.text(MAX_NAME)?.to_owned(),
            incarnation: from.number()?,
            key_check: from.number()?,
            cells_check: from.number()?,
            rank: u32::try_from(from.number()?).ok()?,
            silence: if from.0.is_empty() { None } else { from.maybe()? },
        }),
        2 => Message::Charge(from.charges()?),
        3 => Message::Debit(from.charges()?),
        4 => Message::Release(from.charges()?),
        5 => Message::Return {
            units: Box::new(from.charge()?),
            taken_at: Timestamp::from_micros(from.number()?),
            full_at: Timestamp::from_micros(from.number()?),
            id: PermitId(from.wide()?),
        },
        6 => Message::Batch(Arc::new(batch(from)?)),
        7 => Message::Outcomes(from.outcomes()?),
        8 => Message::Done(all_sightings(from)?),
        9 => {
            let why = from.text(MAX_REASON)?.to_owned();
            match from.byte() {
                Some(OTHER_PROCESS) => Message::OtherProcess(why),
                Some(NOT_APPLIED) => Message::NotApplied(why, all_sightings(from)?),
                _ => Message::Failed(why),
            }
        }
        10 => Message::Busy(all_sightings(from)?),
        other => Message::Unknown(other),
    })
}

fn all_sightings(from: &mut Reader<'_>) -> Option<Vec<Sighting>> {
    let mut seen = from.sightings(Sign::Answered)?;
    if !from.0.is_empty() {
        seen.extend(from.sightings(Sign::Requested)?);
        seen.extend(from.sightings(Sign::Able)?);
    }
    Some(seen)
}

impl Writer {
    fn all_sightings(&mut self, seen: &[Sighting]) {
        self.sightings(seen, Sign::Answered);
        if seen.iter().any(|seen| seen.sign != Sign::Answered) {
            self.sightings(seen, Sign::Requested);
            self.sightings(seen, Sign::Able);
        }
    }

    /// Appends the cells of which this was seen.
    fn sightings(&mut self, seen: &[Sighting], sign: Sign) {
        let seen = || seen.iter().filter(|seen| seen.sign == sign).take(MAX_CELLS);
        self.number(seen().count() as u64);
        for Sighting { cell, age, .. } in seen() {
            self.text(cell);
            self.number(*age);
        }
    }
}

impl Reader<'_> {
    fn sightings(&mut self, sign: Sign) -> Option<Vec<Sighting>> {
        let count = self.count(MAX_CELLS)?;
        let seen = |_| Some(Sighting { cell: self.text(MAX_NAME)?.to_owned(), age: self.number()?, sign });
        (0..count).map(seen).collect()
    }
}

fn batch(from: &mut Reader<'_>) -> Option<Batch> {
    let sequence = from.number()?;
    let count = from.count(MAX_CHARGES)?;
    let (mut counters, mut places) = (Vec::new(), Vec::new());
    for _ in 0..count {
        let length = from.count(MAX_MESSAGE)?;
        // A limit of a kind that this release does not know: its entries are skipped, and the others are not.
        let counter = sent_counter(Reader(from.take(length)?));
        places.push(counter.is_some().then_some(counters.len()));
        counters.extend(counter);
    }
    let skipped = places.iter().filter(|place| place.is_none()).count();
    let count = from.count(MAX_BATCH)?;
    let mut entries = Vec::with_capacity(count.min(from.0.len() / MIN_ENTRY));
    for _ in 0..count {
        let place = *places.get(usize::try_from(from.number()?).ok()?)?;
        let (values, units) = (from.values()?, from.signed()?);
        if let Some(counter) = place.and_then(|place| u32::try_from(place).ok()) {
            entries.push(BatchEntry { counter, values, units });
        }
    }
    let covers = if from.0.is_empty() { None } else { from.maybe()? };
    let made_at = if from.0.is_empty() { None } else { from.maybe()? };
    Some(Batch { sequence, counters, entries, covers, made_at, skipped })
}

/// Reads a counter of a batch, and of refunds when their units were taken.
fn sent_counter(mut from: Reader<'_>) -> Option<SentCounter> {
    let counter = from.counter()?;
    let taken = if from.0.is_empty() { None } else { Some(Timestamp::from_micros(from.number()?)) };
    Some(SentCounter { limit: counter.limit.refunding(taken), ..counter })
}
