//! Lua scripts, assembled from their parts, with their SHA-1 digests.

use redis::Script;

/// A script and its SHA-1 digest.
pub(super) struct Lua {
    pub(super) text: &'static str,
    pub(super) sha: String,
}

impl Lua {
    fn new(text: &'static str) -> Self {
        Self { text, sha: Script::new(text).get_hash().to_owned() }
    }
}

/// All scripts that pipelines call.
pub(super) struct Scripts {
    pub(super) buckets: Lua,
    pub(super) charge: Lua,
    pub(super) debit: Lua,
    pub(super) short_debit: Lua,
    pub(super) undo: Lua,
    pub(super) return_units: Lua,
    pub(super) envoy: Lua,
}

macro_rules! script {
    ($body:literal $(after $first:literal)?) => {
        Lua::new(concat!(
            include_str!("lua/begin.lua"),
            $(include_str!($first),)?
            include_str!("lua/scale.lua"),
            include_str!("lua/read.lua"),
            include_str!("lua/decode.lua"),
            include_str!("lua/wide.lua"),
            include_str!("lua/step.lua"),
            include_str!("lua/loss.lua"),
            include_str!($body),
            include_str!("lua/write.lua"),
            include_str!("lua/reply.lua"),
        ))
    };
}

impl Scripts {
    pub(super) fn new() -> Self {
        Self {
            buckets: Lua::new(concat!(
                include_str!("lua/one_bucket.lua"),
                include_str!("lua/few_buckets.lua"),
                // A function, because every definition costs each call: only the general steps call it.
                "local function scale()\n",
                include_str!("lua/scale.lua"),
                "return convert, expand, expand_window\nend\n",
                include_str!("lua/buckets.lua"),
            )),
            charge: script!("lua/charge.lua" after "lua/short.lua"),
            debit: script!("lua/debit.lua"),
            short_debit: Lua::new(include_str!("lua/short_debit.lua")),
            undo: script!("lua/undo.lua"),
            return_units: script!("lua/return_units.lua"),
            envoy: Lua::new(include_str!("lua/envoy.lua")),
        }
    }
}
