//! Nothing that is told lets anybody call as somebody else.

use super::*;

const KEY: &str = "sk_live_4242424242424242";

fn shown(mask: &Mask, pairs: &[(&str, &str)]) -> Vec<String> {
    mask.shown(pairs).0.into_iter().map(|(_, value)| value).collect()
}

/// Whoever reads the log must not be able to call as somebody else.
#[test]
fn secrets_are_not_told_under_any_name() {
    let mask = Mask::of_this_process();
    let told = shown(
        &mask,
        &[("api_key", KEY), ("user", KEY), ("path", &format!("/a/{KEY}/b")), ("endpoint", "/o?x=1")],
    );
    assert!(told.iter().all(|value| !value.contains(&KEY[7..])), "{told:?}");
    assert!(told[0].starts_with("sk_liv…"), "{told:?}");
    assert_eq!((told[0] == told[1], told[3].as_str()), (true, "/o"));
    assert_ne!(told, shown(&Mask::of_this_process(), &[("api_key", KEY)]), "the hash is keyed");
}

/// Nor where it is sent with more around it, or spelled as addresses spell it.
#[test]
fn secrets_are_not_told_however_they_are_written() {
    let mask = Mask::by(|_| 0);
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
        let told = shown(&mask, &[("authorization", secret), ("client", sent)]);
        assert!(told[1].ends_with("…00000000"), "{sent} beside {secret}: {told:?}");
    }
    // What is only short, or has nothing of it, is told as it is; so is how it was sent.
    for open in ["Bearer", "Bearer ", "sk_live", "/v1/orders", "100%", "%zz%4", "4242"] {
        let told = shown(&mask, &[("authorization", &bearer), ("client", open)]);
        assert_eq!(told[1], open, "beside {bearer}");
    }
    // A cut in the midst of an escape.
    let long = format!("/{}/sk%20live%2FSECRET42x", "x".repeat(LONGEST));
    let end = long.find("%2F").expect("an escape") + 2;
    let told = shown(&mask, &[("api_key", spaced), ("path", &long[end - LONGEST..end])]);
    assert!(told[1].ends_with("…00000000"), "{told:?}");
}

/// Values are cut, and may be so in the midst of a secret.
#[test]
fn no_part_of_a_secret_is_told_where_a_value_was_cut() {
    let mask = Mask::by(|_| 0);
    let whole = format!("/{}/{KEY}", "x".repeat(LONGEST));
    // Wherever the cut falls: between the first character of the key and the last.
    for told in secret::SHORTEST..=KEY.len() {
        let cut = &whole[whole.len() - KEY.len() + told - LONGEST..][..LONGEST];
        let shown = shown(&mask, &[("path", cut), ("api_key", KEY)]);
        assert!(shown[0].ends_with("…00000000"), "{told}: {shown:?}");
    }
    let ends = &whole[..LONGEST];
    assert_eq!(shown(&mask, &[("path", ends), ("api_key", KEY)])[0], ends);
    let short = format!("/a/{}", &KEY[..6]);
    assert_eq!(shown(&mask, &[("path", &short), ("api_key", KEY)])[0], short, "it was not cut");
    let name = "n".repeat(LONGEST);
    assert_eq!(shown(&mask, &[(&name, "abcdefgh")])[0], "ab…00000000", "it may have gone on as `…_token`");
}

#[test]
fn more_can_be_hidden() {
    let mask = Mask::by(|_| 0x1234_5678_0000_0000);
    let pairs = [("user", "alice@example.com"), ("plan", "a")];
    assert_eq!(shown(&mask, &pairs), ["alice@example.com", "a"]);
    let also = mask.clone().hiding(Hide::Also(vec!["user".to_owned()]), HiddenAs::Hash);
    assert_eq!(shown(&also, &pairs), ["alic…12345678", "a"]);
    assert_eq!(shown(&mask.hiding(Hide::All, HiddenAs::Mask), &pairs), ["alic…", "…"]);
}

#[test]
fn a_counters_values_are_hidden_as_attributes_are() {
    let mask = Mask::by(|_| 0x1234_5678_0000_0000);
    let network = Part::Network { address: u128::from(0xffff_0a01_0200_u64), prefix: 120 };
    let parts = [Part::Secret(KEY), Part::Text("alice@example.com"), Part::Text("/o?x=1"), network];
    let told = |mask: &Mask| parts.map(|part| mask.part(&part));
    assert_eq!(told(&mask), ["sk_liv…12345678", "alice@example.com", "/o", "10.1.2.0/24"]);
    assert_eq!(told(&mask)[0], shown(&mask, &[("api_key", KEY)])[0], "it is one caller to all who look");
    let also = mask.clone().hiding(Hide::Also(vec!["user".to_owned()]), HiddenAs::Hash);
    assert_eq!(told(&also), ["sk_liv…12345678", "alic…12345678", "/…12345678", "10…12345678"]);
}

#[test]
fn callers_and_networks_are_found() {
    let mask = Mask::by(|text| text.len() as u64);
    let who = |pairs: &[(&str, &str)]| {
        let (shown, ids) = mask.shown(pairs);
        mask.caller(pairs, &shown, &ids).map(|caller| caller.shown)
    };
    assert_eq!(
        who(&[("endpoint", "/"), ("remote_address", "10.1.2.3"), ("user", "bob")]).as_deref(),
        Some("bob")
    );
    assert_eq!(who(&[("endpoint", "/"), ("shop", "s1")]).as_deref(), Some("s1"));
    assert_eq!(who(&[("endpoint", "/")]), None);
    let from = |mask: &Mask, address| {
        let pairs = [("user", "bob"), ("remote_address", address)];
        network(&pairs, &mask.shown(&pairs).0)
    };
    assert_eq!(from(&mask, "10.1.2.3").as_deref(), Some("10.1.2.0/24"));
    assert_eq!(from(&mask, "2001:db8:1:2:3::4").as_deref(), Some("2001:db8:1:2::/64"));
    assert_eq!(from(&mask, "unix"), None);
    // Whoever hides addresses hides most of them with their networks.
    for hide in [Hide::All, Hide::Also(vec!["remote_address".to_owned()])] {
        assert_eq!(from(&mask.clone().hiding(hide, HiddenAs::Hash), "10.1.2.3"), None);
    }
    // Who is known by an address alone shares it with nobody, shown or not.
    let alone = [("endpoint", "/"), ("ip", "10.1.2.3")];
    let hidden = mask.hiding(Hide::Also(vec!["user".to_owned()]), HiddenAs::Hash);
    assert_eq!(network(&alone, &hidden.shown(&alone).0), None);
    let twice = [("user", "10.1.2.3"), ("ip", "10.1.2.4")];
    assert_eq!(network(&twice, &hidden.shown(&twice).0), None);
}
