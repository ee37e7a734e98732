//! Script call: the requests that one call decides, encoded as its argument and decoded from its reply.

use super::bucket_args::BucketArgs;
use super::decode_state;
use super::envoy_keys;
use super::last_replies::Arrival;
use super::permit_sets::{self, Declare, PermitSet};
use super::pipeline::{Command, Failure, Job, ShardReply};
use super::recompute::recompute;
use super::script::{Lua, Scripts};
use super::script_args::{ScriptArgs, ScriptOp};
use super::server_error::ServerError;
use super::shard::Shared;
use super::shard_request::BundleCounter;
use redis::{Cmd, Pipeline, Value};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use tollgate_core::{Admission, State, Timestamp};

/// Maximum requests in one call: a script must not block its server for long.
const MAX_REQUESTS: usize = 32;
/// Maximum counters in one call, for the same reason.
const MAX_COUNTERS: usize = 128;

/// One script call.
#[derive(Default)]
pub(super) struct ScriptCall {
    jobs: Vec<Job>,
    bundles: Vec<String>,
    bundle_index: HashMap<String, usize, foldhash::fast::RandomState>,
    counters: Vec<BundleCounter>,
    /// For each bundle, the indexes of its counters.
    counters_of: Vec<SmallVec<[usize; 2]>>,
    /// For each job, the numbers of its counters within the call.
    numbers: Vec<SmallVec<[u16; 4]>>,
    kind: Kind,
    /// Which sets of permits are among the keys.
    declare: Declare,
}

/// Which script a call needs, and in which form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Kind {
    #[default]
    General,
    /// Charges that `lua/short.lua` can decide, or debits for `lua/short_debit.lua`, each counter once.
    Short,
    /// Buckets of one bundle per request.
    Buckets,
    /// Its counters are plain numbers under keys of envoyproxy/ratelimit.
    Envoy,
}

impl Kind {
    fn of(job: &Job) -> Self {
        let is_charge = matches!(job.command, Command::Charge);
        let is_debit = matches!(job.command, Command::Debit);
        match &job.request {
            request if request.envoy_at.is_some() => Self::Envoy,
            request if is_charge && request.is_plain() => Self::Buckets,
            request if is_charge && request.is_short() => Self::Short,
            request if is_debit && request.is_short() && request.charges.len() == request.counters.len() => {
                Self::Short
            }
            _ => Self::General,
        }
    }
}

/// Result of a call.
pub(super) enum CallResult {
    Done,
    /// The server refuses to work.
    Refused(ServerError),
    /// Replied, but this server is no longer the primary.
    WrongServer(ServerError),
    /// To be sent again, with the script's text.
    Again(Vec<ScriptCall>),
}

impl ScriptCall {
    /// Groups jobs into as few calls as their slots allow, in the order of the jobs.
    pub(super) fn group(jobs: impl Iterator<Item = Job>, merges: bool) -> Vec<Self> {
        let mut calls: Vec<Self> = Vec::new();
        let mut open: HashMap<(u16, Kind), usize, foldhash::fast::RandomState> = HashMap::default();
        for job in jobs {
            let alone = !matches!(job.command, Command::Charge) || job.request.is_partial || job.is_asking;
            let kind = Kind::of(&job);
            let place = (if merges { 0 } else { job.slot }, kind);
            let known = open.get(&place).copied().filter(|at| !alone && calls[*at].has_room(&job));
            if let Some(at) = known {
                calls[at].add(job);
                continue;
            }
            let mut call = Self { kind, ..Self::default() };
            call.add(job);
            calls.push(call);
            // Later jobs must not overtake a call that stands alone.
            if alone {
                open.remove(&place);
            } else {
                open.insert(place, calls.len() - 1);
            }
        }
        calls
    }

    /// Returns the number of requests.
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    fn has_room(&self, job: &Job) -> bool {
        self.jobs.len() < MAX_REQUESTS && self.counters.len() + job.request.counters.len() <= MAX_COUNTERS
    }

    fn add(&mut self, job: Job) {
        let request = &job.request;
        let bundles: SmallVec<[usize; 4]> = request
            .bundles
            .iter()
            .map(|bundle| {
                if let Some(at) = self.bundle_index.get(bundle) {
                    return *at;
                }
                let at = self.bundles.len();
                self.bundles.push(bundle.clone());
                self.counters_of.push(SmallVec::new());
                self.bundle_index.insert(bundle.clone(), at);
                at
            })
            .collect();
        let numbers = request.counters.iter().map(|counter| {
            let bundle = bundles[counter.bundle];
            let mut known = self.counters_of[bundle].iter().copied();
            let known = known.find(|at| self.counters[*at].name == counter.name);
            let at = known.unwrap_or_else(|| {
                let at = self.counters.len();
                self.counters.push(BundleCounter { bundle, ..counter.clone() });
                self.counters_of[bundle].push(at);
                at
            });
            // A bucket of two scales, or two counters of one bundle: not alone in a short form.
            if self.kind == Kind::Short && (at != bundle || self.counters[at].short != counter.short) {
                self.kind = Kind::General;
            }
            u16::try_from(at + 1).unwrap_or(u16::MAX)
        });
        let numbers = numbers.collect();
        self.numbers.push(numbers);
        self.jobs.push(job);
    }

    pub(super) fn is_asking(&self) -> bool {
        self.jobs.first().is_some_and(|job| job.is_asking)
    }

    /// Adds the call to a pipeline.
    pub(super) fn write(
        &self,
        pipeline: &mut Pipeline,
        scripts: &Scripts,
        fixed_time: Option<Timestamp>,
        near: Timestamp,
        by_name: bool,
    ) {
        if self.kind == Kind::Envoy {
            return self.write_envoy(pipeline, scripts, near, by_name);
        }
        if self.kind == Kind::Buckets {
            return self.write_buckets(pipeline, scripts, fixed_time, by_name);
        }
        let work = &self.jobs[0].command;
        let script = match work {
            Command::Charge => &scripts.charge,
            Command::Debit if self.kind == Kind::Short => &scripts.short_debit,
            Command::Debit | Command::Release => &scripts.debit,
            Command::Undo { .. } => &scripts.undo,
            Command::ReturnUnits { .. } => &scripts.return_units,
        };
        let mut ask = ScriptArgs::new(fixed_time, near);
        let are_debits = self.kind == Kind::Short && matches!(work, Command::Debit);
        let sets = if are_debits { Vec::new() } else { self.permit_sets() };
        if !are_debits {
            for (index, counter) in self.counters.iter().enumerate() {
                let set = sets.iter().position(|set| usize::from(set.counter) == index + 1);
                ask.counter(counter, set.map(|at| (&sets[at], self.bundles.len() + at + 1)));
            }
        }
        for (job, numbers) in self.jobs.iter().zip(&self.numbers) {
            match &job.command {
                Command::Charge => ask.request(&job.request, numbers),
                Command::Debit if are_debits => ask.debits(&job.request),
                Command::Debit => ask.charges(&job.request, numbers, ScriptOp::Debit),
                Command::Release => ask.charges(&job.request, numbers, ScriptOp::Release),
                Command::Undo { taken_at: taken, .. } => {
                    ask.taken_at(*taken);
                    ask.request(&job.request, numbers);
                    ask.marks(&job.request);
                }
                Command::ReturnUnits { taken_at: taken, full_at } => {
                    ask.return_units(&job.request, numbers, *taken, *full_at);
                }
            }
        }
        let ask = match are_debits {
            true => ask.finish_debits(),
            false => ask.finish(self.kind == Kind::Short),
        };
        let mut command = self.command(pipeline, script, by_name);
        command.arg(self.bundles.len() + sets.len()).arg(&self.bundles);
        sets.iter().for_each(|set| {
            command.arg(&set.key);
        });
        command.arg(ask);
        if !sets.is_empty() || matches!(work, Command::Undo { .. }) {
            command.arg(self.bundles.len());
        }
        if let Command::Undo { priors, .. } = work {
            command.arg(priors);
        }
        pipeline.add_command(command);
    }

    /// Returns the sets of permits that the call may use.
    fn permit_sets(&self) -> Vec<PermitSet> {
        permit_sets::from_jobs(self.declare, &self.jobs, &self.numbers, &self.counters, &self.bundles)
    }

    /// Adds a call on nothing but buckets to a pipeline.
    fn write_buckets(
        &self,
        pipeline: &mut Pipeline,
        scripts: &Scripts,
        fixed_time: Option<Timestamp>,
        by_name: bool,
    ) {
        let mut ask = BucketArgs::default();
        for (job, numbers) in self.jobs.iter().zip(&self.numbers) {
            ask.request(&job.request, self.counters[usize::from(numbers[0]) - 1].bundle + 1);
        }
        let mut command = self.command(pipeline, &scripts.buckets, by_name);
        command.arg(self.bundles.len()).arg(&self.bundles).arg(ask.finish(fixed_time));
        pipeline.add_command(command);
    }

    /// Returns the beginning of a call of this script, by its digest or by its text.
    fn command(&self, pipeline: &mut Pipeline, script: &Lua, by_name: bool) -> Cmd {
        if self.is_asking() {
            pipeline.add_command(redis::cmd("ASKING"));
        }
        let mut command = Cmd::new();
        match by_name {
            true => command.arg("EVALSHA").arg(&script.sha),
            false => command.arg("EVAL").arg(script.text),
        };
        command
    }

    /// Adds a call on plain numbers to a pipeline.
    fn write_envoy(&self, pipeline: &mut Pipeline, scripts: &Scripts, now: Timestamp, by_name: bool) {
        let mut command = self.command(pipeline, &scripts.envoy, by_name);
        command.arg(self.bundles.len()).arg(&self.bundles).arg(now.as_micros()).arg(self.jobs.len());
        for (job, numbers) in self.jobs.iter().zip(&self.numbers) {
            let undoes = matches!(job.command, Command::Undo { .. });
            for want in &job.request.charges {
                let bundle = self.counters[usize::from(numbers[want.counter]) - 1].bundle;
                let units = i64::try_from(want.cost.units()).unwrap_or(i64::MAX);
                let units = if want.cost.is_refund() != undoes { -units } else { units };
                command.arg(bundle + 1).arg(units).arg(want.expiry);
            }
        }
        pipeline.add_command(command);
    }

    /// Decodes the reply and distributes it to the jobs.
    pub(super) fn decode(self, value: Value, shared: &Shared) -> CallResult {
        let values = match value {
            Value::Array(values) => values,
            Value::ServerError(error) => {
                return self.reject(error.code(), error.details().unwrap_or_default(), shared);
            }
            other => {
                self.fail(&Failure::Lost(format!("an answer that is none: {other:?}")), shared);
                return CallResult::Done;
            }
        };
        let is_charge = self.jobs.first().is_some_and(|job| matches!(job.command, Command::Charge));
        if let ([Value::Int(now), Value::BulkString(why)], false) = (values.as_slice(), is_charge) {
            // A bundle is in another form: nothing was debited.
            if !why.is_empty() {
                return CallResult::Again(vec![Self { kind: Kind::General, ..self }]);
            }
            let now = Timestamp::from_micros(u64::try_from(*now).unwrap_or(0));
            self.reply(&[], now, &[], shared);
            return CallResult::Done;
        }
        let bundles = self.bundles.len();
        match (values.get(bundles), values.get(bundles + 1), values.first()) {
            (Some(Value::Int(now)), Some(Value::BulkString(decided)), _) => {
                let now = Timestamp::from_micros(u64::try_from(*now).unwrap_or(0));
                self.reply(&values[..bundles], now, decided, shared);
            }
            (_, _, Some(Value::Int(now))) => {
                let now = Timestamp::from_micros(u64::try_from(*now).unwrap_or(0));
                self.fail(&Failure::ClockMismatch(now), shared);
            }
            _ => self.fail(&Failure::Lost("an answer that cannot be read".to_owned()), shared),
        }
        CallResult::Done
    }

    fn reply(self, kept: &[Value], now: Timestamp, decided: &[u8], shared: &Shared) {
        let held = |bundle: usize| match kept.get(bundle) {
            Some(Value::BulkString(bytes)) => Some(bytes.as_slice()),
            _ => None,
        };
        let state = |counter: &BundleCounter| match self.kind {
            Kind::Envoy => envoy_keys::state(&self.bundles[counter.bundle], held(counter.bundle)),
            _ => decode_state::state(held(counter.bundle), counter),
        };
        // Nobody waits for the outcomes of other commands.
        let is_charge = self.jobs.first().is_some_and(|job| matches!(job.command, Command::Charge));
        let mut states: Vec<State> = self.counters.iter().filter(|_| is_charge).map(state).collect();
        let reset_at = |at: usize| match self.kind {
            Kind::Envoy => None,
            _ => decode_state::reset_at(held(self.counters[at].bundle), &self.counters[at]),
        };
        let received_at = shared.clock.now();
        for (at, (mut job, numbers)) in self.jobs.into_iter().zip(self.numbers).enumerate() {
            let request = std::mem::take(&mut job.request);
            let now = request.envoy_at.unwrap_or(now);
            if !matches!(job.command, Command::Charge) {
                let (admission, outcomes) = (Admission::Admitted, SmallVec::new());
                let reply = ShardReply { now, admission, outcomes, priors: Vec::new(), request };
                job.answer(Ok(reply), &shared.late);
                continue;
            }
            let (admission, recomputed) = recompute(
                &mut states,
                |want| usize::from(numbers[want.counter]) - 1,
                &request.charges,
                now,
                !request.is_partial,
                (request.loss, reset_at),
            );
            let scripted =
                if decided.get(at) == Some(&b'1') { Admission::Admitted } else { Admission::Denied };
            if scripted != admission {
                shared.mismatches.fetch_add(1, Ordering::Relaxed);
                let details = format!("the script decided {scripted:?}, this node {admission:?}");
                shared.damaged_keys.report(&request.bundles, "mismatch:", &details, shared.now());
                if scripted == Admission::Denied {
                    // Nothing was charged, and what the node computed admits: neither can be relied on.
                    job.request = request;
                    job.fail(Failure::Damaged(details), &shared.late);
                    continue;
                }
            }
            let arrival = if job.reply.is_closed() { Arrival::Late } else { Arrival::InTime };
            for (want, recomputed) in request.charges.iter().zip(&recomputed) {
                let counter = &self.counters[usize::from(numbers[want.counter]) - 1];
                let outcome = recomputed.resolve(scripted, want.enforcement);
                shared.last_replies.record(
                    (&self.bundles[counter.bundle], &counter.name),
                    want.limit.capacity(),
                    (&outcome, recomputed.is_assumed),
                    arrival,
                    received_at,
                );
            }
            let priors = if request.needs_priors() {
                let places = request.bundles.iter().filter_map(|bundle| self.bundle_index.get(bundle));
                places.map(|bundle| held(*bundle).unwrap_or_default().to_vec()).collect()
            } else {
                Vec::new()
            };
            // The script's decision is what was applied.
            let reply = ShardReply { now, admission: scripted, outcomes: recomputed, priors, request };
            job.answer(Ok(reply), &shared.late);
        }
    }

    fn reject(self, code: &str, details: &str, shared: &Shared) -> CallResult {
        let address = || details.split(' ').nth(1).unwrap_or_default().to_owned();
        let (failure, decoded) = match code {
            "NOSCRIPT" => return CallResult::Again(vec![self]),
            "MOVED" => (Failure::Moved(address()), CallResult::Done),
            "ASK" => (Failure::Ask(address()), CallResult::Done),
            _ => {
                let error = ServerError::new(code, details);
                return self.refuse(error, code, details, shared);
            }
        };
        self.fail(&failure, shared);
        decoded
    }

    fn refuse(self, error: ServerError, code: &str, details: &str, shared: &Shared) -> CallResult {
        let (failure, decoded) = match error.code() {
            "TRYAGAIN" => (Failure::Rejected(error), CallResult::Done),
            // The server responds, but not as a primary: a reconnect looks up the primary again. The script wrote nothing:
            // Redis rejects the first write, and none after it.
            "READONLY" | "MASTERDOWN" => (Failure::Rejected(error.clone()), CallResult::WrongServer(error)),
            _ if permit_sets::is_undeclared(details) => {
                return CallResult::Again(vec![Self { declare: Declare::All, ..self }]);
            }
            // The script failed on the contents of a key, and has written nothing, or taken it off: that concerns this key alone.
            _ if is_damaged(&error, code, details) && self.jobs.len() > 1 => {
                return CallResult::Again(self.split());
            }
            _ if is_damaged(&error, code, details) => {
                let sets = self.permit_sets().into_iter().map(|set| set.key);
                let keys: Vec<String> = self.bundles.iter().cloned().chain(sets).collect();
                let keys = damaged_key(details, &keys).unwrap_or(&self.bundles);
                shared.damaged_keys.report(keys, code, details, shared.now());
                (Failure::Damaged(format!("{code} {details}")), CallResult::Done)
            }
            _ => (Failure::Rejected(error.clone()), CallResult::Refused(error)),
        };
        self.fail(&failure, shared);
        decoded
    }

    /// Returns a call for each request.
    fn split(self) -> Vec<Self> {
        let alone = |job| {
            let mut call = Self { kind: Kind::of(&job), ..Self::default() };
            call.add(job);
            call
        };
        self.jobs.into_iter().map(alone).collect()
    }

    pub(super) fn fail(self, why: &Failure, shared: &Shared) {
        self.jobs.into_iter().for_each(|job| job.fail(why.clone(), &shared.late));
    }
}

/// Returns the key that a script says it cannot read; `None` if it does not say which.
fn damaged_key<'a>(details: &str, keys: &'a [String]) -> Option<&'a [String]> {
    let (before, _) = details.split_once(" holds no counters")?;
    let index = before.rsplit(' ').next()?.parse::<usize>().ok()?.checked_sub(1)?;
    keys.get(index..=index)
}

/// Returns whether an error is about the contents of a key: a wrong type, or a text that the script cannot read.
fn is_damaged(error: &ServerError, code: &str, details: &str) -> bool {
    let is_script_error = details.contains("user_script:") && !details.contains("nknown Redis command");
    code == "WRONGTYPE"
        || details.contains("WRONGTYPE")
        || code == "ERR" && is_script_error && !error.is_known()
}
