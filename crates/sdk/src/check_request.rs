//! What is asked about a request. Made by the program's own closure, so that anything it knows can decide.

use http::header::HeaderValue;
#[cfg(feature = "in-process")]
use smallvec::SmallVec;
use std::borrow::Cow;
#[cfg(feature = "in-process")]
use tollgate_core::Cost;
#[cfg(feature = "in-process")]
use tollgate_engine::CheckInput;
#[cfg(feature = "in-process")]
use tollgate_rules::Descriptor;

/// The key and the value of an attribute.
pub(crate) type Pair = (Cow<'static, str>, String);

/// What a request is to the rules, and what it costs.
///
/// ```
/// use tollgate_sdk::CheckRequest;
/// let ask = CheckRequest::attributes([("user", "ann")]).with_attribute("tier", "pro").with_cost(3);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckRequest {
    pub(crate) form: CheckForm,
    pub(crate) cost: u64,
    /// The trace that it is part of.
    pub(crate) traceparent: Option<HeaderValue>,
}

/// The two forms that a request comes in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CheckForm {
    Attributes(Vec<Pair>),
    Descriptors(Vec<Vec<Pair>>),
}

impl CheckRequest {
    /// A bag of attributes: every rule whose keys it has applies. Every bag has `global: aggregate`, whatever it says.
    #[must_use]
    pub fn attributes<K: Into<Cow<'static, str>>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        Self { form: CheckForm::Attributes(attribute_pairs(pairs)), cost: 1, traceparent: None }
    }

    /// Descriptors, each of which meets one rule, as Envoy has it.
    #[must_use]
    pub fn descriptors<D, K, V>(descriptors: impl IntoIterator<Item = D>) -> Self
    where
        D: IntoIterator<Item = (K, V)>,
        K: Into<Cow<'static, str>>,
        V: Into<String>,
    {
        Self {
            form: CheckForm::Descriptors(descriptors.into_iter().map(attribute_pairs).collect()),
            cost: 1,
            traceparent: None,
        }
    }

    /// With one more attribute; for descriptors, one more entry of the last.
    #[must_use]
    pub fn with_attribute(mut self, key: impl Into<Cow<'static, str>>, value: impl Into<String>) -> Self {
        let pair = (key.into(), value.into());
        match &mut self.form {
            CheckForm::Attributes(pairs) => pairs.push(pair),
            CheckForm::Descriptors(all) => match all.last_mut() {
                Some(last) => last.push(pair),
                None => all.push(vec![pair]),
            },
        }
        self
    }

    /// At another cost than one. Zero only looks.
    #[must_use]
    pub const fn with_cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// As part of the trace that this `traceparent` names. The layer finds it in a request by itself.
    #[must_use]
    pub fn with_traceparent(mut self, traceparent: HeaderValue) -> Self {
        self.traceparent = Some(traceparent);
        self
    }

    #[cfg(feature = "in-process")]
    pub(crate) const fn engine_cost(&self) -> Cost {
        Cost::new(self.cost)
    }
}

fn attribute_pairs<K: Into<Cow<'static, str>>, V: Into<String>>(
    pairs: impl IntoIterator<Item = (K, V)>,
) -> Vec<Pair> {
    pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
}

/// The entries of all descriptors; a single one for attributes.
#[cfg(feature = "in-process")]
pub(crate) type Entries<'r> = SmallVec<[SmallVec<[(&'r str, &'r str); 8]>; 1]>;

#[cfg(feature = "in-process")]
impl CheckRequest {
    pub(crate) fn entries(&self) -> Entries<'_> {
        fn borrow(pairs: &[Pair]) -> SmallVec<[(&str, &str); 8]> {
            pairs.iter().map(|(key, value)| (&**key, value.as_str())).collect()
        }
        match &self.form {
            CheckForm::Attributes(pairs) => SmallVec::from_buf([borrow(pairs)]),
            CheckForm::Descriptors(all) => all.iter().map(|pairs| borrow(pairs)).collect(),
        }
    }

    /// Returns the request as the engine takes it, of its [`Self::entries`] and their [`descriptors`].
    pub(crate) fn engine_request<'e>(
        &self,
        entries: &'e Entries<'_>,
        descriptors: &'e [Descriptor<'e>],
    ) -> CheckInput<'e> {
        match &self.form {
            CheckForm::Attributes(_) => {
                CheckInput::Attributes(entries.first().map_or(&[][..], |pairs| pairs))
            }
            CheckForm::Descriptors(_) => CheckInput::Descriptors(descriptors),
        }
    }
}

#[cfg(feature = "in-process")]
pub(crate) fn descriptors<'e>(entries: &'e Entries<'_>) -> SmallVec<[Descriptor<'e>; 4]> {
    entries.iter().map(|entries| Descriptor { entries, hits: None, limit: None }).collect()
}
