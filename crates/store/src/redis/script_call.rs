//! One script call: the requests it decides, as an argument and back as answers.

use super::decode_state;
use super::key_encoding::Name;
use super::pipeline::{Answer, Failure, Job, Work};
use super::recompute::replay;
use super::script::Scripts;
use super::script_args::{Ask, Verb};
use redis::{Cmd, Pipeline, Value};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_core::{Admission, State, Timestamp};

/// Requests in one call: a script must not hold its server up for long.
const MOST_REQUESTS: usize = 32;
/// Counters in one call, for the same reason.
const MOST_COUNTERS: usize = 128;

/// One script call.
#[derive(Default)]
pub(super) struct Call {
    jobs: Vec<Job>,
    bundles: Vec<String>,
    places: HashMap<String, usize, foldhash::fast::RandomState>,
    counters: Vec<(usize, Name)>,
    /// For each job, which of the call's counters are its own.
    numbers: Vec<SmallVec<[u16; 4]>>,
    is_plain: bool,
}

/// What became of a call.
pub(super) enum Decoded {
    Done,
    /// Answered, but this server is not the one to ask.
    WrongServer,
    /// To be sent again with the script's text.
    UnknownScript(Call),
}

impl Call {
    /// As few calls as the jobs' places allow, in the jobs' order.
    pub(super) fn group(jobs: impl Iterator<Item = Job>, merges: bool) -> Vec<Self> {
        let mut calls: Vec<Self> = Vec::new();
        let mut open: HashMap<(u16, bool), usize, foldhash::fast::RandomState> = HashMap::default();
        for job in jobs {
            let alone = !matches!(job.work, Work::Charge) || job.request.is_partial || job.asking;
            let is_plain = matches!(job.work, Work::Charge) && job.request.is_plain();
            let place = (if merges { 0 } else { job.slot }, is_plain);
            let known = open.get(&place).copied().filter(|at| !alone && calls[*at].has_room(&job));
            if let Some(at) = known {
                calls[at].add(job);
                continue;
            }
            let mut call = Self { is_plain, ..Self::default() };
            call.add(job);
            calls.push(call);
            // What comes after a call that stands alone must not overtake it.
            if alone {
                open.remove(&place);
            } else {
                open.insert(place, calls.len() - 1);
            }
        }
        calls
    }

    fn has_room(&self, job: &Job) -> bool {
        self.jobs.len() < MOST_REQUESTS && self.counters.len() + job.request.counters.len() <= MOST_COUNTERS
    }

    fn add(&mut self, job: Job) {
        let request = &job.request;
        let bundles: SmallVec<[usize; 4]> = request
            .bundles
            .iter()
            .map(|bundle| {
                *self.places.entry(bundle.clone()).or_insert_with(|| {
                    self.bundles.push(bundle.clone());
                    self.bundles.len() - 1
                })
            })
            .collect();
        let numbers = request.counters.iter().map(|(bundle, name)| {
            let bundle = bundles[*bundle];
            let known = self.counters.iter().position(|(at, whose)| *at == bundle && whose == name);
            let at = known.unwrap_or_else(|| {
                self.counters.push((bundle, name.clone()));
                self.counters.len() - 1
            });
            u16::try_from(at + 1).unwrap_or(u16::MAX)
        });
        let numbers = numbers.collect();
        self.numbers.push(numbers);
        self.jobs.push(job);
    }

    pub(super) fn is_asking(&self) -> bool {
        self.jobs.first().is_some_and(|job| job.asking)
    }

    /// Adds the call to a pipeline.
    pub(super) fn write(
        &self,
        pipeline: &mut Pipeline,
        scripts: &Scripts,
        told: Option<Timestamp>,
        near: Timestamp,
        by_name: bool,
    ) {
        let work = &self.jobs[0].work;
        let script = match work {
            Work::Charge if self.is_plain => &scripts.buckets,
            Work::Charge => &scripts.charge,
            Work::Debit | Work::Release => &scripts.debit,
            Work::GiveBack { .. } => &scripts.give_back,
            Work::Return { .. } => &scripts.hand_back,
        };
        let mut ask = Ask::new(told, near);
        if !self.is_plain {
            for (bundle, name) in &self.counters {
                ask.counter(bundle + 1, name);
            }
        }
        for (job, numbers) in self.jobs.iter().zip(&self.numbers) {
            match &job.work {
                Work::Charge if self.is_plain => {
                    let bundle = self.counters[usize::from(numbers[0]) - 1].0;
                    ask.buckets(&job.request, bundle + 1);
                }
                Work::Charge => ask.request(&job.request, numbers),
                Work::Debit => ask.wants(&job.request, numbers, Verb::Debit),
                Work::Release => ask.wants(&job.request, numbers, Verb::Release),
                Work::GiveBack { taken, .. } => {
                    ask.taken(*taken);
                    ask.request(&job.request, numbers);
                    ask.marks(&job.request);
                }
                Work::Return { taken, full_at } => {
                    ask.hand_back(&job.request, numbers, *taken, *full_at);
                }
            }
        }
        if self.is_asking() {
            pipeline.add_command(redis::cmd("ASKING"));
        }
        let mut command = Cmd::new();
        if by_name {
            command.arg("EVALSHA").arg(&script.sha);
        } else {
            command.arg("EVAL").arg(script.text);
        }
        command.arg(self.bundles.len()).arg(&self.bundles).arg(if self.is_plain {
            ask.finish_buckets()
        } else {
            ask.finish()
        });
        if let Work::GiveBack { priors, .. } = work {
            command.arg(priors);
        }
        pipeline.add_command(command);
    }

    /// Hands the answer out to the jobs.
    pub(super) fn decode(self, value: Value, disagreements: &AtomicUsize) -> Decoded {
        let values = match value {
            Value::Array(values) => values,
            Value::ServerError(error) => {
                return self.refused(error.code(), error.details().unwrap_or_default());
            }
            other => {
                self.fail(&Failure::Lost(format!("an answer that is none: {other:?}")));
                return Decoded::Done;
            }
        };
        let bundles = self.bundles.len();
        match (values.get(bundles), values.get(bundles + 1), values.first()) {
            (Some(Value::Int(now)), Some(Value::BulkString(decided)), _) => {
                let now = Timestamp::from_micros(u64::try_from(*now).unwrap_or(0));
                self.answer(&values[..bundles], now, decided, disagreements);
            }
            (_, _, Some(Value::Int(now))) => {
                self.fail(&Failure::Elsewhen(Timestamp::from_micros(u64::try_from(*now).unwrap_or(0))));
            }
            _ => self.fail(&Failure::Lost("an answer that cannot be read".to_owned())),
        }
        Decoded::Done
    }

    fn answer(self, kept: &[Value], now: Timestamp, decided: &[u8], disagreements: &AtomicUsize) {
        let held = |bundle: usize| match &kept[bundle] {
            Value::BulkString(bytes) => Some(bytes.as_slice()),
            _ => None,
        };
        let mut states: Vec<State> =
            self.counters.iter().map(|(bundle, name)| decode_state::state(held(*bundle), name)).collect();
        for (at, (job, numbers)) in self.jobs.into_iter().zip(self.numbers).enumerate() {
            if !matches!(job.work, Work::Charge) {
                let done = Answer {
                    now,
                    admission: Admission::Admitted,
                    told: SmallVec::new(),
                    priors: Vec::new(),
                    loss: job.request.loss,
                };
                let _ = job.reply.send(Ok(done));
                continue;
            }
            let request = &job.request;
            let (admission, told) = replay(
                &mut states,
                |want| usize::from(numbers[want.counter]) - 1,
                &request.wants,
                now,
                !request.is_partial,
                request.loss,
            );
            let scripted =
                if decided.get(at) == Some(&b'1') { Admission::Admitted } else { Admission::Denied };
            if scripted != admission {
                disagreements.fetch_add(1, Ordering::Relaxed);
                tracing::error!(?scripted, ?admission, "a script and its step disagree");
            }
            let priors = if request.is_partial {
                (0..kept.len()).map(|bundle| held(bundle).unwrap_or_default().to_vec()).collect()
            } else {
                Vec::new()
            };
            // The script's word is what was done.
            let _ = job.reply.send(Ok(Answer { now, admission: scripted, told, priors, loss: request.loss }));
        }
    }

    fn refused(self, code: &str, details: &str) -> Decoded {
        let address = || details.split(' ').nth(1).unwrap_or_default().to_owned();
        let (failure, decoded) = match code {
            "NOSCRIPT" => return Decoded::UnknownScript(self),
            "MOVED" => (Failure::Moved(address()), Decoded::Done),
            "ASK" => (Failure::Ask(address()), Decoded::Done),
            // It serves, but not as a primary: whoever connects again looks for the primary again.
            "READONLY" | "MASTERDOWN" => (Failure::Refused(code.to_owned()), Decoded::WrongServer),
            // The script wrote nothing: Redis refuses the first write, and every script writes last.
            _ if details.contains("READONLY") => {
                (Failure::Refused("READONLY".to_owned()), Decoded::WrongServer)
            }
            _ => (Failure::Refused(format!("{code} {details}")), Decoded::Done),
        };
        self.fail(&failure);
        decoded
    }

    pub(super) fn fail(self, why: &Failure) {
        self.jobs.into_iter().for_each(|job| job.fail(why.clone()));
    }
}
