//! Decides in its own process by the rules, quotas and emergency measures of a Tollgate server, and goes on without it.
//!
//!     tollgate serve --rules examples/tiers.yaml --db sqlite:tollgate.db
//!     cargo run -p example-follow -- http://127.0.0.1:8082 api ~/.local/state/tollgate/snapshot.json
//!
//! Reads API keys from its input, one on each line, and writes whether a request of that caller may pass. A token with the
//! role `replica` is read from `TOLLGATE_TOKEN`.

use std::error::Error;
use std::io::{self, Write};
use tollgate_sdk::{CheckRequest, Decider, FollowConfig, Follower};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(server), Some(domain)) = (arguments.next(), arguments.next()) else {
        return Err("usage: example-follow ADMIN_URL DOMAIN [SNAPSHOT]".into());
    };
    let config = FollowConfig {
        token: std::env::var("TOLLGATE_TOKEN").ok(),
        snapshot: arguments.next().map(Into::into),
        ..FollowConfig::new(server)
    };
    decide(config, &domain, io::stdin().lines(), io::stdout()).await
}

/// Decides for each line of the input.
pub async fn decide(
    config: FollowConfig,
    domain: &str,
    keys: impl Iterator<Item = io::Result<String>>,
    mut output: impl Write,
) -> Result<(), Box<dyn Error>> {
    let follower = Follower::start(config).await?;
    let limits = follower.limits(domain)?;
    // The follower works on another thread while this one waits for a line.
    for key in keys {
        let key = key?;
        let decided = limits.decide(CheckRequest::attributes([("api_key", key.as_str())])).await;
        let word = if decided.is_allowed { "allowed" } else { "denied" };
        let status = follower.status();
        writeln!(output, "{key}: {word} by rules {} (control revision {})", status.rules, status.revision)?;
    }
    Ok(())
}
