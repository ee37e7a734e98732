//! What a node remembers, as a text for another node: JSON, in which every word stands once and is then a number. No value
//! that tells who asks is in it (`pseudonym`). What comes in is taken with care: whoever can write to the database could have
//! written it.

use crate::preview::merge::{Room, WIDEST};
use crate::preview::pseudonym::{Hiding, Known};
use crate::preview::sample::{SLICE, SLICES};
use crate::preview::sample_slice::Remembered;
use crate::preview::sampled_request::{Entries, Form, OneDescriptor, Sampled};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::HashMap;
use tollgate_core::{Cost, Timestamp};
use tollgate_rules::Unit;

/// Goes up when nodes of another version could not read it.
const VERSION: u32 = 1;
/// The most that one request may stand for of its caller's.
const MOST_OWN: u64 = 1 << 24;
/// A byte of the text may become so many in memory.
const UNFOLDS: usize = 4;

#[derive(Serialize, Deserialize)]
struct Text {
    version: u32,
    /// By the clock of whoever wrote it.
    now: u64,
    words: Vec<String>,
    slices: Vec<TextSlice>,
}

/// Its number, its mask, and what was asked.
#[derive(Serialize, Deserialize)]
struct TextSlice(u64, u64, Vec<TextRequest>);

/// When, who, how many of its own, how many callers, in which domain, what, and at what cost.
#[derive(Serialize, Deserialize)]
struct TextRequest(u64, u64, u64, u64, u32, TextForm, TextCost);

/// Units, and whether they are given back.
#[derive(Serialize, Deserialize)]
struct TextCost(u64, bool);

/// Its entries by the numbers of their words, its hits, and its limit with the name of a unit.
type TextDescriptor = (Vec<(u32, u32)>, Option<TextCost>, Option<(u32, String)>);

#[derive(Serialize, Deserialize)]
enum TextForm {
    #[serde(rename = "a")]
    Attributes(Vec<(u32, u32)>),
    #[serde(rename = "d")]
    Descriptors(Vec<TextDescriptor>),
}

impl From<Cost> for TextCost {
    fn from(cost: Cost) -> Self {
        Self(cost.units(), cost.is_refund())
    }
}

impl From<TextCost> for Cost {
    fn from(TextCost(units, back): TextCost) -> Self {
        if back { Self::refund(units) } else { Self::take(units) }
    }
}

/// Gives each word a number.
#[derive(Default)]
struct Words {
    numbers: HashMap<String, u32>,
    all: Vec<String>,
}

impl Words {
    fn number(&mut self, word: &str) -> u32 {
        if let Some(number) = self.numbers.get(word) {
            return *number;
        }
        let number = u32::try_from(self.all.len()).unwrap_or(u32::MAX);
        self.numbers.insert(word.to_owned(), number);
        self.all.push(word.to_owned());
        number
    }
}

/// Writes it down, at most so many bytes of it, and so many requests of a slice: where there are more, of fewer callers.
pub(crate) fn write(
    mut remembered: Vec<Remembered>,
    now: Timestamp,
    hiding: &mut Hiding<'_>,
    most: usize,
    requests: usize,
) -> String {
    let mut room = Room { requests, bytes: most * UNFOLDS / (SLICES + 1) };
    loop {
        remembered.iter_mut().for_each(|slice| slice.fit(room));
        let text = write_all(&remembered, now, hiding);
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

fn write_all(remembered: &[Remembered], now: Timestamp, hiding: &mut Hiding<'_>) -> String {
    let mut words = Words::default();
    let slices = remembered.iter().map(|slice| {
        let requests = slice.requests.iter().map(|one| {
            let mut values = hiding.values(one).into_iter();
            let mut pairs = |entries: &Entries, words: &mut Words| -> Vec<(u32, u32)> {
                let one = |((key, _), value): (&(Box<str>, Box<str>), String)| {
                    (words.number(key), words.number(&value))
                };
                entries.iter().zip(values.by_ref()).map(one).collect()
            };
            let form = match &one.form {
                Form::Attributes(entries) => TextForm::Attributes(pairs(entries, &mut words)),
                Form::Descriptors(all) => TextForm::Descriptors(
                    all.iter()
                        .map(|(entries, hits, limit)| {
                            let limit = limit.map(|(count, unit)| (count, unit.name().to_owned()));
                            (pairs(entries, &mut words), hits.map(TextCost::from), limit)
                        })
                        .collect(),
                ),
            };
            let domain = words.number(&one.domain);
            TextRequest(one.at.as_micros(), one.caller, one.own, one.callers, domain, form, one.cost.into())
        });
        TextSlice(slice.number, slice.mask, requests.collect())
    });
    let slices = slices.collect();
    let text = Text { version: VERSION, now: now.as_micros(), words: words.all, slices };
    serde_json::to_string(&text).unwrap_or_default()
}

/// Reads what [`write`] wrote. Where the clocks of the two differ by more than a slice, its times are moved to this node's.
pub(crate) fn read(
    text: &str,
    now: Timestamp,
    known: &Known,
    most: usize,
) -> Result<Vec<Remembered>, String> {
    if text.len() > most {
        return Err("it is too long".to_owned());
    }
    let text: Text = serde_json::from_str(text).map_err(|error| error.to_string())?;
    if text.version != VERSION {
        return Err(format!("it is of version {}, and this program knows {VERSION}", text.version));
    }
    let words: Vec<Box<str>> = text.words.into_iter().map(|word| known.reveal(word)).collect();
    let late = i128::from(now.as_micros()) - i128::from(text.now);
    // What is revealed may be longer than what stood for it.
    let reading = Reading { words, late, left: Cell::new(2 * most * UNFOLDS) };
    let newest = now.as_micros() / SLICE;
    let slices = text.slices.into_iter().filter_map(|slice| reading.slice(slice).transpose());
    let recent =
        |slice: &Remembered| (newest.saturating_sub(SLICES as u64)..=newest + 1).contains(&slice.number);
    slices.filter(|slice| slice.as_ref().map_or(true, recent)).collect()
}

struct Reading {
    words: Vec<Box<str>>,
    /// By how much this node's clock is ahead, in microseconds.
    late: i128,
    /// So much memory may still be taken.
    left: Cell<usize>,
}

impl Reading {
    /// Nothing, where no time of this node's is meant.
    fn slice(&self, TextSlice(number, mask, requests): TextSlice) -> Result<Option<Remembered>, String> {
        let by = (self.late + i128::from(SLICE / 2)).div_euclid(i128::from(SLICE));
        let Ok(number) = u64::try_from(i128::from(number) + by) else { return Ok(None) };
        let mask =
            mask.checked_add(1).filter(|callers| callers.is_power_of_two()).ok_or("its mask is none")? - 1;
        let mask = mask.min(WIDEST);
        let requests = requests.into_iter().map(|one| {
            let mut one = self.request(one)?;
            let at = i128::from(one.at.as_micros()) + by * i128::from(SLICE);
            // What is said to be of a slice is, whatever its time says.
            let first = number.saturating_mul(SLICE);
            let at = u64::try_from(at).unwrap_or(0).clamp(first, first.saturating_add(SLICE - 1));
            one.at = Timestamp::from_micros(at);
            Ok(one)
        });
        Ok(Some(Remembered { number, mask, requests: requests.collect::<Result<_, String>>()? }))
    }

    fn word(&self, number: u32) -> Result<Box<str>, String> {
        let word = self.words.get(number as usize).ok_or_else(|| format!("it has no word {number}"))?;
        let left = self.left.get().checked_sub(word.len() + size_of::<Box<str>>());
        self.left.set(left.ok_or("it unfolds to too much")?);
        Ok(word.clone())
    }

    fn request(
        &self,
        TextRequest(at, caller, own, callers, domain, form, cost): TextRequest,
    ) -> Result<Sampled, String> {
        let entries = |pairs: Vec<(u32, u32)>| -> Result<Entries, String> {
            pairs.into_iter().map(|(key, value)| Ok((self.word(key)?, self.word(value)?))).collect()
        };
        let form = match form {
            TextForm::Attributes(pairs) => Form::Attributes(entries(pairs)?),
            TextForm::Descriptors(all) => {
                let one = |(pairs, hits, limit): TextDescriptor| -> Result<OneDescriptor, String> {
                    let unit = |(count, unit): (u32, String)| {
                        Ok::<_, String>((count, Unit::from_name(&unit).ok_or("it has a unit that is none")?))
                    };
                    Ok((entries(pairs)?, hits.map(Cost::from), limit.map(unit).transpose()?))
                };
                Form::Descriptors(all.into_iter().map(one).collect::<Result<_, String>>()?)
            }
        };
        let (own, callers) = (own.clamp(1, MOST_OWN), callers.clamp(1, WIDEST + 1));
        let at = Timestamp::from_micros(at);
        let mut one = Sampled {
            at,
            caller,
            own,
            callers,
            node: 0,
            domain: self.word(domain)?,
            form,
            cost: cost.into(),
            bytes: 0,
        };
        one.bytes = one.size();
        Ok(one)
    }
}

#[cfg(test)]
mod tests;
