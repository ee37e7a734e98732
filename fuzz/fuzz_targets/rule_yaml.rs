//! Whatever a rule file contains, loading it ends, says the same each time, and points into the file.
#![no_main]

use tollgate_rules::{Options, Ruleset, Source};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let load = || Ruleset::load(&[Source::new("rules.yaml".to_owned(), text)], &Options::default());
    match (load(), load()) {
        (Ok(rules), Ok(again)) => {
            assert_eq!(rules.revision(), again.revision());
            assert_eq!(rules.rules().len(), again.rules().len());
            let warnings = |rules: &Ruleset| rules.warnings().iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(warnings(&rules), warnings(&again));
        }
        (Err(errors), Err(again)) => {
            let said = errors.to_string();
            assert_eq!(said, again.to_string());
            assert!(!said.is_empty(), "an error says what is wrong");
        }
        _ => panic!("loading depends on something else than the text"),
    }
});
