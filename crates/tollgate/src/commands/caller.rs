//! The caller that a command is about: its API key, its id from a list, or its value of another attribute (`--key`).

use crate::admin_client::encoded;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;

#[derive(Debug, Args)]
pub(crate) struct CallerFlags {
    /// API key of the caller, or its id from a list; with --key, its value of that attribute.
    #[arg(value_name = "API_KEY")]
    pub(crate) api_key: String,
    /// Attribute that identifies the caller and that the value is of, such as user_id, tenant or remote_address [default:
    /// api_key]. Say api_key for a key that is spelled like an id (16 or 64 hexadecimal digits).
    #[arg(long, value_name = "ATTRIBUTE", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) key: Option<String>,
}

impl CallerFlags {
    /// Returns a path with the caller after `prefix`, and these parameters.
    pub(crate) fn path(&self, prefix: &str, suffix: &str, parameters: &[String]) -> String {
        let key = self.key.iter().map(|key| format!("key={}", encoded(key)));
        let query: Vec<String> = key.chain(parameters.iter().cloned()).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        format!("{prefix}/{}{suffix}{mark}{}", escaped(&self.api_key), query.join("&"))
    }
}

/// Percent-encodes a key. Unescaped, some are the paths of other operations.
fn escaped(api_key: &str) -> String {
    match api_key {
        "import" => "%69mport".to_owned(),
        "export" => "%65xport".to_owned(),
        "by-id" => "by%2Did".to_owned(),
        other => encoded(other),
    }
}
