//! How cells share a rule's limits: what the rule says, else its group, else `shared`; checked against the cells that the
//! server is configured with.

use super::Compiler;
use crate::draft::RuleDraft;
use crate::region::{LearnedCells, OwnerSetting, RegionSetting, SharedRegion};
use crate::rule::Profile;
use crate::yaml::Position;
use std::sync::Arc;
use tollgate_core::{Mode, RegionMode};

impl Compiler<'_, '_> {
    /// Returns how cells share the rule's limits; `None` if the rule does not say, or what it says is wrong.
    pub(super) fn region_of(&mut self, draft: &RuleDraft) -> Option<SharedRegion> {
        let Some(given) = draft.region.as_ref() else {
            let held = draft.concurrency.as_ref().map(|held| held.at);
            if let Some((at, (message, help))) = held.zip(self.learned(draft, &RegionSetting::default())) {
                self.reader.error_help(at, message, help);
            }
            return None;
        };
        // A group's setting is reported once, not for each rule below it.
        if self.reported_stores.contains(&given.at) {
            return None;
        }
        if let Some((message, help)) = self.problem(draft, &given.value) {
            self.reported_stores.push(given.at);
            self.reader.error_help(given.at, message, help);
            return None;
        }
        self.warn_about(draft, given.at, &given.value);
        Some(Arc::new(given.value.clone()))
    }

    fn problem(&self, draft: &RuleDraft, region: &RegionSetting) -> Option<(String, String)> {
        if draft.mode.is_some_and(|mode| mode.value == Mode::Local) && region.mode != RegionMode::Shared {
            let message =
                format!("`region: {}` with `mode: local`: each node counts for itself", region.mode.name());
            return Some((message, "keep one of them".to_owned()));
        }
        if region.mode == RegionMode::Leased && self.profile == Profile::Envoy {
            let message = "`region: leased` would change the arithmetic of `profile: envoy`".to_owned();
            return Some((message, "write `region: owner`, or leave the profile out".to_owned()));
        }
        let is_divided = region.mode == RegionMode::Split || draft.concurrency.is_some();
        // What a file says for all its rules is for those that have permits.
        let is_of_file =
            self.region.as_ref().map(|of_file| of_file.at) == draft.region.as_ref().map(|own| own.at);
        if region.mode == RegionMode::Shared && !region.weights.is_empty() && !is_divided && !is_of_file {
            let message = "`weights` with `region: shared`: only permits are divided, and this rule has none";
            let help = "leave them out, or write `mode: split`; the weights of cells that are cut off are `cells.weights`";
            return Some((message.to_owned(), help.to_owned()));
        }
        // Read alone, a file says nothing about the cells.
        let place = self.options.cells.as_ref()?;
        let regions = || place.regions.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        if let Some(problem) = self.learned(draft, region) {
            return Some(problem);
        }
        if let OwnerSetting::Region(owner) = &region.owner
            && place.learned.is_none()
            && !place.has_region(owner)
        {
            let message = format!("no cell of a region `{owner}` is configured");
            let help = match place.regions.is_empty() {
                true => format!(
                    "start the server with `--region` and `--peer {owner}=URL`, or leave `region` out"
                ),
                false => {
                    format!("the regions are {}; add `--peer {owner}=URL`, or name one of them", regions())
                }
            };
            return Some((message, help));
        }
        if region.mode == RegionMode::Split && place.region.is_none() {
            let message = "`region: split`, and this server has no region".to_owned();
            return Some((message, "start it with `--region NAME`, or leave `region` out".to_owned()));
        }
        if let Some(own) = place.region.as_ref().filter(|_| is_divided && !region.mode.has_owner()) {
            if !region.weights.is_empty() && !region.weights.iter().any(|(name, _)| name == own) {
                let message = format!("this server's region `{own}` has no weight: it would admit nothing");
                return Some((message, format!("add it, as in `weights: {{{own}: 1}}`; 0 admits nothing")));
            }
            if region.cell_weights(own, place).is_none() {
                let message = "the weights are too large to be divided among the cells".to_owned();
                return Some((message, "write smaller weights in the same proportion".to_owned()));
            }
        }
        None
    }

    /// Returns what a rule says that cells cannot do if they learn of each other while they run.
    fn learned(&self, draft: &RuleDraft, region: &RegionSetting) -> Option<(String, String)> {
        let learned = self.options.cells.as_ref()?.learned?;
        let name_them = "name the cells by `--peer`";
        if draft.mode.is_some_and(|mode| mode.value == Mode::Local) {
            return None;
        }
        if region.mode.has_owner() {
            let is_by_hash = region.owner == OwnerSetting::Hash;
            return is_by_hash.then(|| {
                let message =
                    format!("`region: {}` without an owner: the cells are learned", region.mode.name());
                let help = format!("write `{{mode: {}, owner: REGION}}`, or {name_them}", region.mode.name());
                (message, help)
            });
        }
        let is_divided = region.mode == RegionMode::Split || draft.concurrency.is_some();
        let has_parts = !region.weights.is_empty() && learned == LearnedCells::OnePerRegion;
        (is_divided && !has_parts).then(|| {
            let what = if region.mode == RegionMode::Split { "`region: split`" } else { "`concurrency`" };
            let message = format!("{what} is divided among the cells, and they are learned: their number may change");
            let help = match learned {
                LearnedCells::OnePerRegion => {
                    format!("write `weights` with all regions, or `{{mode: owner, owner: REGION}}`, or {name_them}")
                }
                LearnedCells::Any => format!("write `{{mode: owner, owner: REGION}}`, or {name_them}"),
            };
            (message, help)
        })
    }

    fn warn_about(&mut self, draft: &RuleDraft, at: Position, region: &RegionSetting) {
        if draft.fallback.is_some() && region.mode.has_owner() {
            self.reader.warning(
                at,
                "`fallback` beside an owner: it reserves units for nodes that cannot reach their own store, not for cells \
                 that cannot reach the owner",
                "keep it only if the cell's own store may fail as well",
            );
        }
        let place = self.options.cells.as_ref();
        if let Some(place) = place.filter(|_| region.mode == RegionMode::Split && !region.weights.is_empty())
        {
            let missing: Vec<&str> = place
                .regions
                .iter()
                .map(|(name, _)| name.as_str())
                .filter(|name| !region.weights.iter().any(|(weighted, _)| weighted == name))
                .collect();
            if !missing.is_empty() {
                let message = format!("regions without a weight admit nothing: {}", missing.join(", "));
                self.reader.warning(at, message, "give each a weight, 0 if that is meant");
            }
            let is_known = |region: &str| place.regions.iter().any(|(name, _)| name == region);
            let weighted =
                region.weights.iter().filter(|(_, weight)| *weight > 0).map(|(name, _)| name.as_str());
            let unknown: Vec<&str> = weighted.filter(|name| !is_known(name)).collect();
            if !unknown.is_empty() && place.learned.is_none() {
                let message =
                    format!("no cell is configured of regions with a weight: {}", unknown.join(", "));
                self.reader.warning(
                    at,
                    message,
                    "nobody admits their parts; add `--peer REGION=URL`, or leave them out",
                );
            }
        }
    }
}
