//! Tests of masking: nothing shown allows impersonating a caller.

use super::*;

const KEY: &str = "sk_live_4242424242424242";

fn display(mask: &Mask, pairs: &[(&str, &str)]) -> Vec<String> {
    mask.display(pairs, |_| false).0.into_iter().map(|(_, value)| value).collect()
}

/// A reader of the log must not be able to impersonate a caller.
#[test]
fn secrets_are_masked_under_any_attribute_name() {
    let mask = Mask::random();
    let shown = display(
        &mask,
        &[("api_key", KEY), ("user", KEY), ("path", &format!("/a/{KEY}/b")), ("endpoint", "/o?x=1")],
    );
    assert!(shown.iter().all(|value| !value.contains(&KEY[7..])), "{shown:?}");
    assert!(shown[0].starts_with("sk_liv…"), "{shown:?}");
    assert_eq!((shown[0] == shown[1], shown[3].as_str()), (true, "/o"));
    assert_ne!(shown, display(&Mask::random(), &[("api_key", KEY)]), "the hash is keyed");
}

/// Secrets stay masked when embedded in other values or percent-encoded.
#[test]
fn secrets_are_masked_however_they_are_escaped() {
    let mask = Mask::with_hash(|_| 0);
    let spaced = "sk live/SECRET42x";
    let (bearer, basic) = (format!("Bearer {KEY}"), "basic   dXNlcjpwYXNzd29yZA==".to_owned());
    let part = format!("/v1/{}/x", &KEY[8..]);
    for (secret, sent) in [
        (&*bearer, KEY),
        (&*bearer, &KEY[4..18]),
        (&*bearer, &*part.replace(&KEY[8..], KEY)),
        (&*basic, "dXNlcjpwYXNzd29yZA=="),
        (&*basic, "/dXNlcjpwYXNzd29yZA%3D%3d/x"),
        (spaced, "/v1/sk%20live%2FSECRET42x"),
        (spaced, "sk%20live%2fSECRET42x"),
        (spaced, "/v1/sk%2520live%252FSECRET42x"),
        ("sk%20live%2FSECRET42x", "/v1/sk live/SECRET42x"),
        ("sk%20live%2FSECRET42x", "live/SECRET42x"),
    ] {
        let shown = display(&mask, &[("authorization", secret), ("client", sent)]);
        assert!(shown[1].ends_with("…00000000"), "{sent} beside {secret}: {shown:?}");
    }
    // Short values, and values without any part of the secret, are shown as sent.
    for open in ["Bearer", "Bearer ", "sk_live", "/v1/orders", "100%", "%zz%4", "4242"] {
        let shown = display(&mask, &[("authorization", &bearer), ("client", open)]);
        assert_eq!(shown[1], open, "beside {bearer}");
    }
    // Truncation within an escape.
    let long = format!("/{}/sk%20live%2FSECRET42x", "x".repeat(MAX_VALUE));
    let end = long.find("%2F").expect("an escape") + 2;
    let shown = display(&mask, &[("api_key", spaced), ("path", &long[end - MAX_VALUE..end])]);
    assert!(shown[1].ends_with("…00000000"), "{shown:?}");
}

/// Truncation may split a secret.
#[test]
fn no_part_of_a_secret_is_shown_in_a_truncated_value() {
    let mask = Mask::with_hash(|_| 0);
    let whole = format!("/{}/{KEY}", "x".repeat(MAX_VALUE));
    // For every truncation point between the first and the last character of the key.
    for length in secret::MIN_SECRET..=KEY.len() {
        let cut = &whole[whole.len() - KEY.len() + length - MAX_VALUE..][..MAX_VALUE];
        let shown = display(&mask, &[("path", cut), ("api_key", KEY)]);
        assert!(shown[0].ends_with("…00000000"), "{length}: {shown:?}");
    }
    let ends = &whole[..MAX_VALUE];
    assert_eq!(display(&mask, &[("path", ends), ("api_key", KEY)])[0], ends);
    let short = format!("/a/{}", &KEY[..6]);
    assert_eq!(display(&mask, &[("path", &short), ("api_key", KEY)])[0], short, "not truncated");
    let name = "n".repeat(MAX_VALUE);
    assert_eq!(display(&mask, &[(&name, "abcdefgh")])[0], "ab…00000000", "the full name may end in `_token`");
}

#[test]
fn more_attributes_can_be_masked() {
    let mask = Mask::with_hash(|_| 0x1234_5678_0000_0000);
    let pairs = [("user", "alice@example.com"), ("plan", "a")];
    assert_eq!(display(&mask, &pairs), ["alice@example.com", "a"]);
    let also = mask.clone().with_masked(MaskedAttributes::Also(vec!["user".to_owned()]), MaskStyle::Hash);
    assert_eq!(display(&also, &pairs), ["alic…12345678", "a"]);
    assert_eq!(display(&mask.with_masked(MaskedAttributes::All, MaskStyle::Mask), &pairs), ["alic…", "…"]);
}

#[test]
fn counter_values_are_masked_as_attributes_are() {
    let mask = Mask::with_hash(|_| 0x1234_5678_0000_0000);
    let network = KeyPart::Network { address: u128::from(0xffff_0a01_0200_u64), prefix: 120 };
    let parts = [KeyPart::Secret(KEY), KeyPart::Text("alice@example.com"), KeyPart::Text("/o?x=1"), network];
    let shown = |mask: &Mask| parts.map(|part| mask.mask_part(&part));
    assert_eq!(shown(&mask), ["sk_liv…12345678", "alice@example.com", "/o", "10.1.2.0/24"]);
    assert_eq!(
        shown(&mask)[0],
        display(&mask, &[("api_key", KEY)])[0],
        "counters and attributes mask a caller alike"
    );
    let also = mask.clone().with_masked(MaskedAttributes::Also(vec!["user".to_owned()]), MaskStyle::Hash);
    assert_eq!(shown(&also), ["sk_liv…12345678", "alic…12345678", "/…12345678", "10…12345678"]);
}

#[test]
fn callers_and_networks_are_found() {
    let mask = Mask::with_hash(|text| text.len() as u64);
    let caller = |pairs: &[(&str, &str)]| {
        let (shown, ids) = mask.display(pairs, |_| false);
        mask.caller(pairs, &shown, &ids).map(|masked| masked.display)
    };
    assert_eq!(
        caller(&[("endpoint", "/"), ("remote_address", "10.1.2.3"), ("user", "bob")]).as_deref(),
        Some("bob")
    );
    assert_eq!(caller(&[("endpoint", "/"), ("shop", "s1")]).as_deref(), Some("s1"));
    assert_eq!(caller(&[("endpoint", "/")]), None);
    let from = |mask: &Mask, address| {
        let pairs = [("user", "bob"), ("remote_address", address)];
        network(&pairs, &mask.display(&pairs, |_| false).0)
    };
    assert_eq!(from(&mask, "10.1.2.3").as_deref(), Some("10.1.2.0/24"));
    assert_eq!(from(&mask, "2001:db8:1:2:3::4").as_deref(), Some("2001:db8:1:2::/64"));
    assert_eq!(from(&mask, "unix"), None);
    // Masking addresses also masks their networks.
    for hide in [MaskedAttributes::All, MaskedAttributes::Also(vec!["remote_address".to_owned()])] {
        assert_eq!(from(&mask.clone().with_masked(hide, MaskStyle::Hash), "10.1.2.3"), None);
    }
    // A caller identified by its address shares no network with others, masked or not.
    let alone = [("endpoint", "/"), ("ip", "10.1.2.3")];
    let hidden = mask.with_masked(MaskedAttributes::Also(vec!["user".to_owned()]), MaskStyle::Hash);
    assert_eq!(network(&alone, &hidden.display(&alone, |_| false).0), None);
    let twice = [("user", "10.1.2.3"), ("ip", "10.1.2.4")];
    assert_eq!(network(&twice, &hidden.display(&twice, |_| false).0), None);
}

/// A number of tokens is what an operator looks for; a token is not, nor what only looks like a cost.
#[test]
fn numbers_that_rules_take_a_cost_from_are_shown() {
    let mask = Mask::with_hash(|_| 0);
    let shown = |mask: &Mask, value| {
        mask.display(&[("tokens", value), ("token", "1234")], |name| name == "tokens").0.remove(0).1
    };
    assert_eq!(shown(&mask, "1500"), "1500");
    assert_ne!(shown(&mask, "tk_1500"), "tk_1500");
    assert_eq!(mask.display(&[("tokens", "1500")], |_| false).0[0].1.find("1500"), None);
    let named = mask.with_masked(MaskedAttributes::Also(vec!["tokens".to_owned()]), MaskStyle::Hash);
    assert_ne!(shown(&named, "1500"), "1500");
}
