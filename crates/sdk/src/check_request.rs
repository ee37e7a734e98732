//! A check request: the attributes and the cost of a request. The program's own closure builds it, so that it can use
//! anything that the program has.

use http::header::HeaderValue;
use std::borrow::Cow;
use tollgate_core::Cost;

/// The key and the value of an attribute.
pub(crate) type Pair = (Cow<'static, str>, String);

/// The attributes or descriptors of a request, and its cost.
///
/// ```
/// use tollgate_sdk::CheckRequest;
/// let request = CheckRequest::attributes([("user", "ann")]).with_attribute("tier", "pro").with_cost(3);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckRequest {
    pub(crate) form: CheckForm,
    pub(crate) cost: u64,
    /// The trace context of the request.
    pub(crate) traceparent: Option<HeaderValue>,
}

/// The two forms of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CheckForm {
    Attributes(Vec<Pair>),
    Descriptors(Vec<Vec<Pair>>),
}

impl CheckRequest {
    /// Creates a request from attributes: every rule whose keys are among them matches. `global: aggregate` is always
    /// added.
    #[must_use]
    pub fn attributes<K: Into<Cow<'static, str>>, V: Into<String>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Self {
        Self { form: CheckForm::Attributes(attribute_pairs(pairs)), cost: 1, traceparent: None }
    }

    /// Creates a request from descriptors, each of which matches at most one rule, as in Envoy.
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

    /// Adds an attribute, or an entry to the last descriptor.
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

    /// Sets the cost in units, which is 1 by default; 0 is a peek.
    #[must_use]
    pub const fn with_cost(mut self, units: u64) -> Self {
        self.cost = units;
        self
    }

    /// Sets the `traceparent` of the request's trace. The layer reads it from the request by default.
    #[must_use]
    pub fn with_traceparent(mut self, traceparent: HeaderValue) -> Self {
        self.traceparent = Some(traceparent);
        self
    }

    pub(crate) const fn engine_cost(&self) -> Cost {
        Cost::take(self.cost)
    }
}

fn attribute_pairs<K: Into<Cow<'static, str>>, V: Into<String>>(
    pairs: impl IntoIterator<Item = (K, V)>,
) -> Vec<Pair> {
    pairs.into_iter().map(|(key, value)| (key.into(), value.into())).collect()
}
