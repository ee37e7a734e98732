//! What a node remembers, as a text for another node: JSON, in which every word stands once and is then a number. No value
//! that tells who asks is in it (`pseudonym`). What comes in is taken with care: whoever can write to the database could have
//! written it.

use crate::preview::merge::{MAX_MASK, SliceBudget};
use crate::preview::pseudonym::{KnownValues, Pseudonymizer};
use crate::preview::sample::{SLICE, SLICES};
use crate::preview::sample_slice::SampleSlice;
use crate::preview::sampled_request::{Entries, SampledDescriptor, SampledInput, SampledRequest};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashMap;
use tollgate_core::{Cost, Timestamp};
use tollgate_rules::Unit;

/// Goes up when nodes of another version could not read it.
const VERSION: u32 = 1;
/// The most that one request may stand for of its caller's.
const MAX_WEIGHT: u64 = 1 << 24;
/// A byte of the text may become so many in memory.
const MAX_EXPANSION: usize = 4;

#[derive(Serialize, Deserialize)]
struct EncodedSample {
    version: u32,
    /// By the clock of whoever wrote it.
    now: u64,
    words: Vec<String>,
    slices: Vec<EncodedSlice>,
}

/// Its number, its mask, and what was asked.
#[derive(Serialize, Deserialize)]
struct EncodedSlice(u64, u64, Vec<EncodedRequest>);

/// When, who, how many of its own, how many callers, in which domain, what, and at what cost.
#[derive(Serialize, Deserialize)]
struct EncodedRequest(u64, u64, u64, u64, u32, EncodedInput, EncodedCost);

/// Units, and whether they are given back.
#[derive(Serialize, Deserialize)]
struct EncodedCost(u64, bool);

/// Its entries by the numbers of their words, its hits, and its limit with the name of a unit.
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
        if back { Self::refund(units) } else { Self::take(units) }
    }
}

/// Gives each word a number.
#[derive(Default)]
struct StringTable {
    indexes: HashMap<String, u32>,
    strings: Vec<String>,
}

impl StringTable {
    fn index_of(&mut self, word: &str) -> u32 {
        if let Some(number) = self.indexes.get(word) {
            return *number;
        }
        let number = u32::try_from(self.strings.len()).unwrap_or(u32::MAX);
        self.indexes.insert(word.to_owned(), number);
        self.strings.push(word.to_owned());
        number
    }
}

/// Writes it down, at most so many bytes of it, and so many requests of a slice: where there are more, of fewer callers.
pub(crate) fn encode(
    mut remembered: Vec<SampleSlice>,
    now: Timestamp,
    hiding: &mut Pseudonymizer<'_>,
    most: usize,
    requests: usize,
) -> String {
    let mut room = SliceBudget { requests, bytes: most * MAX_EXPANSION / (SLICES + 1) };
    loop {
        remembered.iter_mut().for_each(|slice| slice.fit(room));
        let text = encode_all(&remembered, now, hiding);
        if text.len() <= most {
            return text;
        }
        let fullest = remembered.iter().map(|slice| slice.requests.len()).max().unwrap_or(0);
        room.requests = fullest / 2;
        if fullest == 0 {
            return String::new();
        }
    }
}

fn encode_all(remembered: &[SampleSlice], now: Timestamp, hiding: &mut Pseudonymizer<'_>) -> String {
    let mut words = StringTable::default();
    let slices = remembered.iter().map(|slice| {
        let requests = slice.requests.iter().map(|one| {
            let mut values = hiding.values(one).into_iter();
            let mut pairs = |entries: &Entries, words: &mut StringTable| -> Vec<(u32, u32)> {
                let one = |((key, _), value): (&(Box<str>, Box<str>), String)| {
                    (words.index_of(key), words.index_of(&value))
                };
                entries.iter().zip(values.by_ref()).map(one).collect()
            };
            let form = match &one.input {
                SampledInput::Attributes(entries) => EncodedInput::Attributes(pairs(entries, &mut words)),
                SampledInput::Descriptors(all) => EncodedInput::Descriptors(
                    all.iter()
                        .map(|(entries, hits, limit)| {
                            let limit = limit.map(|(count, unit)| (count, unit.name().to_owned()));
                            (pairs(entries, &mut words), hits.map(EncodedCost::from), limit)
                        })
                        .collect(),
                ),
            };
            let domain = words.index_of(&one.domain);
            EncodedRequest(
                one.at.as_micros(),
                one.caller,
                one.own,
                one.callers,
                domain,
                form,
                one.cost.into(),
            )
        });
        EncodedSlice(slice.number, slice.mask, requests.collect())
    });
    let slices = slices.collect();
    let text = EncodedSample { version: VERSION, now: now.as_micros(), words: words.strings, slices };
    serde_json::to_string(&text).unwrap_or_default()
}

/// Reads what [`encode`] wrote. Where the clocks of the two differ by more than a slice, its times are moved to this node's.
pub(crate) fn decode(
    text: &str,
    now: Timestamp,
    known: &KnownValues,
    most: usize,
) -> Result<Vec<SampleSlice>, String> {
    if text.len() > most {
        return Err("it is too long".to_owned());
    }
    let text: EncodedSample = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if text.version != VERSION {
        return Err(format!("it is of version {}, and this program knows {VERSION}", text.version));
    }
    let words: Vec<Box<str>> = text.words.into_iter().map(|word| known.restore(word)).collect();
    let late = i128::from(now.as_micros()) - i128::from(text.now);
    // What is revealed may be longer than what stood for it.
    let reading =
        SampleDecoder { strings: words, clock_offset: late, budget: Cell::new(2 * most * MAX_EXPANSION) };
    let newest = now.as_micros() / SLICE;
    let slices = text.slices.into_iter().filter_map(|slice| reading.slice(slice).transpose());
    let recent =
        |slice: &SampleSlice| (newest.saturating_sub(SLICES as u64)..=newest + 1).contains(&slice.number);
    slices.filter(|slice| slice.as_ref().map_or(true, recent)).collect()
}

struct SampleDecoder {
    strings: Vec<Box<str>>,
    /// By how much this node's clock is ahead, in microseconds.
    clock_offset: i128,
    /// So much memory may still be taken.
    budget: Cell<usize>,
}

impl SampleDecoder {
    /// Nothing, where no time of this node's is meant.
    fn slice(
        &self,
        EncodedSlice(number, mask, requests): EncodedSlice,
    ) -> Result<Option<SampleSlice>, String> {
        let by = (self.clock_offset + i128::from(SLICE / 2)).div_euclid(i128::from(SLICE));
        let Ok(number) = u64::try_from(i128::from(number) + by) else { return Ok(None) };
        let mask =
            mask.checked_add(1).filter(|callers| callers.is_power_of_two()).ok_or("its mask is none")? - 1;
        let mask = mask.min(MAX_MASK);
        let requests = requests.into_iter().map(|one| {
            let mut one = self.request(one)?;
            let at = i128::from(one.at.as_micros()) + by * i128::from(SLICE);
            // What is said to be of a slice is, whatever its time says.
            let first = number.saturating_mul(SLICE);
            let at = u64::try_from(at).unwrap_or(0).clamp(first, first.saturating_add(SLICE - 1));
            one.at = Timestamp::from_micros(at);
            Ok(one)
        });
        Ok(Some(SampleSlice { number, mask, requests: requests.collect::<Result<_, String>>()? }))
    }

    fn string(&self, number: u32) -> Result<Box<str>, String> {
        let word = self.strings.get(number as usize).ok_or_else(|| format!("it has no word {number}"))?;
        let left = self.budget.get().checked_sub(word.len() + size_of::<Box<str>>());
        self.budget.set(left.ok_or("it unfolds to too much")?);
        Ok(word.clone())
    }

    fn request(
        &self,
        EncodedRequest(at, caller, own, callers, domain, form, cost): EncodedRequest,
    ) -> Result<SampledRequest, String> {
        let entries = |pairs: Vec<(u32, u32)>| -> Result<Entries, String> {
            pairs.into_iter().map(|(key, value)| Ok((self.string(key)?, self.string(value)?))).collect()
        };
        let form = match form {
            EncodedInput::Attributes(pairs) => SampledInput::Attributes(entries(pairs)?),
            EncodedInput::Descriptors(all) => {
                let one = |(pairs, hits, limit): EncodedDescriptor| -> Result<SampledDescriptor, String> {
                    let unit = |(count, unit): (u32, String)| {
                        Ok::<_, String>((count, Unit::from_name(&unit).ok_or("it has a unit that is none")?))
                    };
                    Ok((entries(pairs)?, hits.map(Cost::from), limit.map(unit).transpose()?))
                };
                SampledInput::Descriptors(all.into_iter().map(one).collect::<Result<_, String>>()?)
            }
        };
        let (own, callers) = (own.clamp(1, MAX_WEIGHT), callers.clamp(1, MAX_MASK + 1));
        let at = Timestamp::from_micros(at);
        let mut one = SampledRequest {
            at,
            caller,
            own,
            callers,
            node: 0,
            domain: self.string(domain)?,
            input: form,
            cost: cost.into(),
            bytes: 0,
        };
        one.bytes = one.size();
        Ok(one)
    }
}

#[cfg(test)]
mod tests;
