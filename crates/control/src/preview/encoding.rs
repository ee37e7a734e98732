//! Encoding of traffic samples for other nodes: JSON with a string table, in which every string occurs once and is
//! referenced by index. Values that identify callers are pseudonymized (`pseudonym`). Input is not trusted: anybody
//! with write access to the database could have written it.

use crate::preview::merge::{MAX_MASK, SliceBudget};
use crate::preview::pseudonym::{KnownValues, Pseudonymizer};
use crate::preview::sample::{SLICE, SLICES};
use crate::preview::sample_slice::SampleSlice;
use crate::preview::sampled_request::{Entries, SampledDescriptor, SampledInput, SampledRequest};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashMap;
use tollgate_core::{Cost, TimeDelta, Timestamp};
use tollgate_rules::{Unit, parse_inline_period};

/// Format version; increases when nodes of another version could not read the text.
const VERSION: u32 = 1;
/// Maximum number of a caller's requests that one sampled request may represent.
const MAX_OWN_REQUESTS: u64 = 1 << 24;
/// Bytes of memory that one byte of text may expand to.
const MAX_EXPANSION: usize = 4;

#[derive(Serialize, Deserialize)]
struct EncodedSample {
    version: u32,
    /// Time by the sender's clock, in microseconds.
    now: u64,
    words: Vec<String>,
    slices: Vec<EncodedSlice>,
}

/// Slice number, mask, and requests.
#[derive(Serialize, Deserialize)]
struct EncodedSlice(u64, u64, Vec<EncodedRequest>);

/// Time, caller, number of the caller's requests, number of callers, domain, input and cost.
#[derive(Serialize, Deserialize)]
struct EncodedRequest(u64, u64, u64, u64, u32, EncodedInput, EncodedCost);

/// Units, and whether they are a refund.
#[derive(Serialize, Deserialize)]
struct EncodedCost(u64, bool);

/// Entries by string index, hits, and the inline limit with the name of its period.
type EncodedDescriptor = (Vec<(u32, u32)>, Option<EncodedCost>, Option<(u32, String)>);

#[derive(Serialize, Deserialize)]
enum EncodedInput {
    #[serde(rename = "a")]
    Attributes(Vec<(u32, u32)>),
    #[serde(rename = "d")]
    Descriptors(Vec<EncodedDescriptor>),
}

impl From<Cost> for EncodedCost {
    fn from(cost: Cost) -> Self {
        Self(cost.units(), cost.is_refund())
    }
}

impl From<EncodedCost> for Cost {
    fn from(EncodedCost(units, back): EncodedCost) -> Self {
        if back { Self::refund(units) } else { Self::new(units) }
    }
}

/// Maps strings to indexes.
#[derive(Default)]
struct StringTable {
    indexes: HashMap<String, u32>,
    strings: Vec<String>,
}

impl StringTable {
    fn index_of(&mut self, text: &str) -> u32 {
        if let Some(index) = self.indexes.get(text) {
            return *index;
        }
        let index = u32::try_from(self.strings.len()).unwrap_or(u32::MAX);
        self.indexes.insert(text.to_owned(), index);
        self.strings.push(text.to_owned());
        index
    }
}

/// Encodes a sample in at most `max` bytes, with at most `requests` per slice. If there are more, callers are left
/// out.
pub(crate) fn encode(
    mut sample: Vec<SampleSlice>,
    now: Timestamp,
    pseudonymizer: &mut Pseudonymizer<'_>,
    max: usize,
    requests: usize,
) -> String {
    let mut budget = SliceBudget { requests, bytes: max * MAX_EXPANSION / (SLICES + 1) };
    loop {
        sample.iter_mut().for_each(|slice| slice.fit(budget));
        let text = encode_all(&sample, now, pseudonymizer);
        if text.len() <= max {
            return text;
        }
        let fullest = sample.iter().map(|slice| slice.requests.len()).max().unwrap_or(0);
        budget.requests = fullest / 2;
        if fullest == 0 {
            return String::new();
        }
    }
}

fn encode_all(sample: &[SampleSlice], now: Timestamp, pseudonymizer: &mut Pseudonymizer<'_>) -> String {
    let mut strings = StringTable::default();
    let slices = sample.iter().map(|slice| {
        let requests = slice.requests.iter().map(|one| {
            let mut values = pseudonymizer.values(one).into_iter();
            let mut pairs = |entries: &Entries, strings: &mut StringTable| -> Vec<(u32, u32)> {
                let one = |((key, _), value): (&(Box<str>, Box<str>), String)| {
                    (strings.index_of(key), strings.index_of(&value))
                };
                entries.iter().zip(values.by_ref()).map(one).collect()
            };
            let input = match &one.input {
                SampledInput::Attributes(entries) => EncodedInput::Attributes(pairs(entries, &mut strings)),
                SampledInput::Descriptors(all) => EncodedInput::Descriptors(
                    all.iter()
                        .map(|(entries, hits, limit)| {
                            let limit = limit.map(|(count, length)| (count, period_name(length)));
                            (pairs(entries, &mut strings), hits.map(EncodedCost::from), limit)
                        })
                        .collect(),
                ),
            };
            let domain = strings.index_of(&one.domain);
            EncodedRequest(
                one.at.as_micros(),
                one.caller,
                one.own,
                one.callers,
                domain,
                input,
                one.cost.into(),
            )
        });
        EncodedSlice(slice.number, slice.mask, requests.collect())
    });
    let slices = slices.collect();
    let text = EncodedSample { version: VERSION, now: now.as_micros(), words: strings.strings, slices };
    serde_json::to_string(&text).unwrap_or_default()
}

/// Decodes what [`encode`] wrote. If the clocks of the two nodes differ by more than a slice, times are shifted to
/// this node's.
pub(crate) fn decode(
    text: &str,
    now: Timestamp,
    known: &KnownValues,
    max: usize,
) -> Result<Vec<SampleSlice>, String> {
    if text.len() > max {
        return Err("sample is too long".to_owned());
    }
    let text: EncodedSample = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if text.version != VERSION {
        return Err(format!("sample has version {}, and this node supports {VERSION}", text.version));
    }
    let strings: Vec<Box<str>> = text.words.into_iter().map(|text| known.restore(text)).collect();
    let clock_offset = i128::from(now.as_micros()) - i128::from(text.now);
    // A restored value may be longer than its pseudonym.
    let decoder = SampleDecoder { strings, clock_offset, budget: Cell::new(2 * max * MAX_EXPANSION) };
    let newest = now.as_micros() / SLICE;
    let slices = text.slices.into_iter().filter_map(|slice| decoder.slice(slice).transpose());
    let recent =
        |slice: &SampleSlice| (newest.saturating_sub(SLICES as u64)..=newest + 1).contains(&slice.number);
    slices.filter(|slice| slice.as_ref().map_or(true, recent)).collect()
}

struct SampleDecoder {
    strings: Vec<Box<str>>,
    /// How far this node's clock is ahead, in microseconds.
    clock_offset: i128,
    /// Memory that may still be allocated, in bytes.
    budget: Cell<usize>,
}

impl SampleDecoder {
    /// Decodes a slice; returns `None` if its time is not representable on this node.
    fn slice(
        &self,
        EncodedSlice(number, mask, requests): EncodedSlice,
    ) -> Result<Option<SampleSlice>, String> {
        let by = (self.clock_offset + i128::from(SLICE / 2)).div_euclid(i128::from(SLICE));
        let Ok(number) = u64::try_from(i128::from(number) + by) else { return Ok(None) };
        let mask = mask.checked_add(1).filter(|callers| callers.is_power_of_two()).ok_or("invalid mask")? - 1;
        let mask = mask.min(MAX_MASK);
        let requests = requests.into_iter().map(|one| {
            let mut one = self.request(one)?;
            let at = i128::from(one.at.as_micros()) + by * i128::from(SLICE);
            // A request belongs to its slice, whatever its own time is.
            let first = number.saturating_mul(SLICE);
            let at = u64::try_from(at).unwrap_or(0).clamp(first, first.saturating_add(SLICE - 1));
            one.at = Timestamp::from_micros(at);
            Ok(one)
        });
        Ok(Some(SampleSlice { number, mask, requests: requests.collect::<Result<_, String>>()? }))
    }

    fn string(&self, number: u32) -> Result<Box<str>, String> {
        let text =
            self.strings.get(number as usize).ok_or_else(|| format!("no string with index {number}"))?;
        let left = self.budget.get().checked_sub(text.len() + size_of::<Box<str>>());
        self.budget.set(left.ok_or("sample expands to too many bytes")?);
        Ok(text.clone())
    }

    fn request(
        &self,
        EncodedRequest(at, caller, own, callers, domain, input, cost): EncodedRequest,
    ) -> Result<SampledRequest, String> {
        let entries = |pairs: Vec<(u32, u32)>| -> Result<Entries, String> {
            pairs.into_iter().map(|(key, value)| Ok((self.string(key)?, self.string(value)?))).collect()
        };
        let input = match input {
            EncodedInput::Attributes(pairs) => SampledInput::Attributes(entries(pairs)?),
            EncodedInput::Descriptors(all) => {
                let one = |(pairs, hits, limit): EncodedDescriptor| -> Result<SampledDescriptor, String> {
                    let unit = |(count, unit): (u32, String)| {
                        Ok::<_, String>((count, parse_inline_period(&unit).ok_or("unknown unit")?))
                    };
                    Ok((entries(pairs)?, hits.map(Cost::from), limit.map(unit).transpose()?))
                };
                SampledInput::Descriptors(all.into_iter().map(one).collect::<Result<_, String>>()?)
            }
        };
        let (own, callers) = (own.clamp(1, MAX_OWN_REQUESTS), callers.clamp(1, MAX_MASK + 1));
        let at = Timestamp::from_micros(at);
        let mut one = SampledRequest {
            at,
            caller,
            own,
            callers,
            node: 0,
            domain: self.string(domain)?,
            input,
            cost: cost.into(),
            bytes: 0,
        };
        one.bytes = one.size();
        Ok(one)
    }
}

/// Returns the name of an inline limit's period: that of its unit, or its length.
fn period_name(length: TimeDelta) -> String {
    let other = || format!("{}us", length.as_micros());
    Unit::from_length(length).map_or_else(other, |unit| unit.name().to_owned())
}

/// See [`crate::properties::peer_sample`].
pub(crate) fn properties(text: &str, hasher: &crate::KeyHasher, now: Timestamp) {
    const MAX: usize = 64 * 1024;
    let known = KnownValues::new(hasher, std::iter::empty(), &[]);
    let Ok(slices) = decode(text, now, &known, MAX) else { return };
    let bytes: usize = slices.iter().flat_map(|slice| &slice.requests).map(|one| one.bytes).sum();
    assert!(bytes <= 64 * MAX, "{bytes} bytes from {}", text.len());
    let newest = now.as_micros() / SLICE;
    for slice in &slices {
        assert!((newest.saturating_sub(SLICES as u64)..=newest + 1).contains(&slice.number));
        assert!(slice.requests.iter().all(|one| one.at.as_micros() / SLICE == slice.number));
        assert!(
            slice.requests.iter().all(|one| (1..=MAX_OWN_REQUESTS).contains(&one.own) && one.callers > 0)
        );
    }
}

#[cfg(test)]
mod tests;
