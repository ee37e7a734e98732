//! A check request: the attributes and the cost of a request. The program's own closure builds it, so that it can use
//! anything that the program has.

use http::header::HeaderValue;
use http::request::Parts;
#[cfg(feature = "in-process")]
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;
#[cfg(feature = "in-process")]
use tollgate_core::Cost;
use tollgate_core::Timestamp;
#[cfg(feature = "in-process")]
use tollgate_engine::CheckInput;
use tollgate_http::identity::{AmbiguousIdentity, EndpointTarget, IdentityResolver, RequestView};
#[cfg(feature = "in-process")]
use tollgate_rules::Descriptor;

/// Length of a `traceparent` that is forwarded, in bytes.
#[cfg(any(feature = "remote", feature = "remote-http"))]
pub(crate) const TRACEPARENT: usize = 55;

/// The key and the value of an attribute.
pub(crate) type Pair = (Cow<'static, str>, String);

/// What a layer's closure found in a request: what to check, that nothing limits it, or why it is refused.
///
/// Closures return an `Option<CheckRequest>`, or a `Result` of [`CheckRequest::identified`].
#[derive(Debug)]
pub enum Extracted {
    /// The request is checked.
    Check(CheckRequest),
    /// The request is not limited.
    Unlimited,
    /// Servers would read the request differently, so it is refused with the error's status.
    Refused(AmbiguousIdentity),
}

impl From<CheckRequest> for Extracted {
    fn from(request: CheckRequest) -> Self {
        Self::Check(request)
    }
}

impl From<Option<CheckRequest>> for Extracted {
    fn from(request: Option<CheckRequest>) -> Self {
        request.map_or(Self::Unlimited, Self::Check)
    }
}

impl<T: Into<Self>> From<Result<T, AmbiguousIdentity>> for Extracted {
    fn from(request: Result<T, AmbiguousIdentity>) -> Self {
        request.map_or_else(Self::Refused, Into::into)
    }
}

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
    /// Set if the endpoint is that of a request head, so that rules in this process resolve it by what they name.
    pub(crate) target: Option<EndpointTarget>,
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
        Self { form: CheckForm::Attributes(attribute_pairs(pairs)), cost: 1, traceparent: None, target: None }
    }

    /// Creates a request from the attributes of its caller: address, key, user and endpoint, by the same rules as the
    /// gateway and `/check`. `peer` is the address of the connection. Rules in this process
    /// ([`InProcess`](crate::InProcess)) know the endpoints that they name; for those of a server, list them in
    /// [`IdentityConfig::routes`](crate::IdentityConfig).
    ///
    /// # Errors
    /// Servers would read the request differently. A layer refuses it if its closure returns the error.
    pub fn identified(
        identity: &IdentityResolver,
        peer: IpAddr,
        request: &Parts,
        now: Timestamp,
    ) -> Result<Self, AmbiguousIdentity> {
        let view = RequestView::new(peer, &request.method, &request.uri, &request.headers);
        let caller = identity.resolve_in_place(&view, now)?;
        let attributes = caller.attributes();
        let found = Self::attributes(attributes.iter().map(|(key, value)| ((*key).to_owned(), *value)));
        Ok(Self { target: Some(identity.endpoint_target(&request.method)), ..found })
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
            target: None,
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
    /// Replaces what the settings alone say of the endpoint by what `endpoint` returns for the target and the path.
    pub(crate) fn with_endpoint(
        mut self,
        endpoint: impl FnOnce(&EndpointTarget, &str) -> Option<(String, String)>,
    ) -> Self {
        if let (Some(target), CheckForm::Attributes(pairs)) = (&self.target, &mut self.form)
            && let Some((_, path)) = pairs.iter().find(|(key, _)| key == "path")
            && let Some((method, endpoint)) = endpoint(target, path)
        {
            for (known, value) in [("method", method), ("endpoint", endpoint)] {
                if let Some(pair) = pairs.iter_mut().find(|(key, _)| key == known) {
                    pair.1 = value;
                }
            }
        }
        self
    }

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
