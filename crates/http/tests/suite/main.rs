//! Requests and responses of HTTP: who is asking, what is answered, and what is refused.

mod identity;
mod jwt;
mod known_keys;
mod properties;
mod proxy_protocol;
mod responses;
mod spellings;
mod traces;
