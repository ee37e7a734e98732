//! Effective settings of a rule, after inheritance and defaults: what `explain` shows and rule diffs compare.

use crate::rule::{Action, Class, CostFrom, Enforce, FailPolicy, OnError, Role, Rule};
use tollgate_core::Mode;

impl Rule {
    /// Returns the settings by the names that rule files use. Those with neutral values (a priority of 0, no shadow)
    /// are omitted; the class and the fail policy always appear.
    ///
    /// ```
    /// # use tollgate_rules::{Options, Ruleset, Source};
    /// let text = "
    /// domain: d
    /// descriptors:
    ///   - key: endpoint
    ///     value: POST /login
    ///     class: security
    ///     descriptors: [{key: user, limit: 5/minute}]
    /// ";
    /// let rules = Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).unwrap();
    /// let settings = rules.rules()[0].settings();
    /// assert_eq!(settings[..2], [("class", "security".to_owned()), ("on_error", "closed".to_owned())]);
    /// ```
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let class = match self.class {
            Class::Comfort => "comfort",
            Class::Security => "security",
            Class::Cost => "cost",
            Class::Strict => "strict",
        };
        let mut all = vec![("class", class.to_owned()), ("on_error", on_error(&self.on_error))];
        let mut add = |name, value: Option<String>| all.extend(value.map(|value| (name, value)));
        let roles = || self.all_limits().map(|limit| limit.role);
        add("shadow", roles().any(|role| role == Role::Shadow).then(|| "true".to_owned()));
        add("enforce", self.enforce.as_ref().map(|enforce| Enforce::percent(enforce.thousandths)));
        add("quota_mode", roles().any(|role| role == Role::Quota).then(|| "true".to_owned()));
        let action = match self.action {
            Action::Reject => None,
            Action::Delay => Some("delay"),
            Action::Degrade => Some("degrade"),
        };
        add("action", action.map(str::to_owned));
        let mode = match self.mode {
            Mode::Central => Some("central"),
            Mode::Leased => Some("leased"),
            Mode::Local => Some("local"),
            Mode::Adaptive => None,
        };
        add("mode", mode.map(str::to_owned));
        add("store", self.store.as_deref().map(str::to_owned));
        let of_tiers = self.tier_stores.iter();
        let of_tiers: Vec<String> = of_tiers
            .map(|(tier, store)| format!("{tier}: {}", store.as_deref().unwrap_or("default")))
            .collect();
        add("tiers.store", (!of_tiers.is_empty()).then(|| of_tiers.join(", ")));
        add("region", self.region.as_deref().map(ToString::to_string));
        add("fallback", self.fallback.map(|part| format!("{}.{}%", part / 10, part % 10)));
        add("split", self.split.map(|split| split.to_string()));
        add("shard_by", self.shard_by.clone());
        add("priority", (self.priority != 0).then(|| self.priority.to_string()));
        add("cost", (self.cost != CostFrom::Request).then(|| self.cost.to_string()));
        add("billing", self.billing.is_some().then(|| "true".to_owned()));
        add("durable", self.durable_setting());
        add("replaces", (!self.replaces.is_empty()).then(|| self.replaces.join(", ")));
        add("detailed_metric", self.detailed_metric.then(|| "true".to_owned()));
        add("value_to_metric", self.value_to_metric.then(|| "true".to_owned()));
        add("response", self.response.as_ref().map(ToString::to_string));
        add("metadata", (!self.metadata.is_empty()).then(|| self.metadata.to_string()));
        all
    }

    /// Returns `durable`, if it is said or a limit is durable by default.
    fn durable_setting(&self) -> Option<String> {
        let is_durable = self.all_limits().any(|limit| limit.scope.is_durable());
        (is_durable || self.durable.is_some()).then(|| is_durable.to_string())
    }
}

fn on_error(policy: &OnError) -> String {
    let word = |policy: &FailPolicy| match policy {
        FailPolicy::Open => "open",
        FailPolicy::Closed => "closed",
        FailPolicy::Local => "local",
    };
    match policy {
        OnError::Always(policy) => word(policy).to_owned(),
        OnError::ByTier { tiers, otherwise } => {
            let each = tiers.iter().map(|(tier, policy)| format!("{tier}: {}", word(policy)));
            let all: Vec<String> = each.chain([format!("default: {}", word(otherwise))]).collect();
            format!("{{{}}}", all.join(", "))
        }
    }
}
