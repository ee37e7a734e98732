//! Module layering: the folders of this crate form layers, and no two files import each other, so that a change to
//! one folder requires reading only those above it.
//!
//! `control_plane.rs` is the one hub. It owns the state of every folder, and every folder adds methods to it, so it
//! is left out between folders; between files it is not, so the state that it owns is in files that do not import it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The imports of each module, by module name: `quota::table`.
type Imports = BTreeMap<String, BTreeSet<String>>;

const HUB: &str = "control_plane";

/// Collects all modules except tests, with their text. `lib.rs` only lists the others and re-exports their items: it is
/// left out, and who names `crate::Item` imports the module that [`reexports`] finds.
fn modules(folder: &Path, name: &str, found: &mut BTreeMap<String, String>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_owned();
        let own = if name.is_empty() { stem.clone() } else { format!("{name}::{stem}") };
        if path.is_dir() {
            modules(&path, &own, found);
        } else if path.extension().is_some_and(|end| end == "rs") && stem != "tests" && own != "lib" {
            let text = std::fs::read_to_string(&path).expect("a file");
            let own = if stem == "mod" { name.to_owned() } else { own };
            assert!(found.insert(own, code(&text)).is_none(), "{} exists twice", path.display());
        }
    }
}

/// Returns a file without comments, and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

/// Parses the paths of a tree such as `db::{on, time::{tell, timestamp}}`, and returns the rest of the text.
fn tree<'a>(mut text: &'a str, before: &[&'a str], paths: &mut Vec<Vec<&'a str>>) -> &'a str {
    let mut path = before.to_vec();
    loop {
        text = text.trim_start();
        if let Some(mut within) = text.strip_prefix('{') {
            loop {
                within = within.trim_start_matches(|c: char| c.is_whitespace() || c == ',' || c == '*');
                let rest = tree(within, &path, paths);
                if rest.len() == within.len() {
                    return within.strip_prefix('}').unwrap_or(within);
                }
                within = rest;
            }
        }
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
        path.push(&text[..end]);
        text = &text[end..];
        match text.strip_prefix("::") {
            Some(rest) => text = rest,
            None => {
                paths.push(path);
                return text;
            }
        }
    }
}

/// Returns the paths of the items that the crate's root re-exports, by item: `PublishError` is `rules::publish::PublishError`.
fn reexports(root: &str) -> BTreeMap<&str, Vec<&str>> {
    assert!(!root.contains(" as ") && !root.contains("::*"), "such re-exports are not read");
    let mut paths = Vec::new();
    for (at, start) in root.match_indices("pub use ") {
        tree(&root[at + start.len()..], &[], &mut paths);
    }
    paths.into_iter().filter_map(|path| Some((*path.last()?, path))).collect()
}

/// Returns the modules that this one names anywhere: in `use`, in a signature, in a macro.
fn imports(
    own: &str,
    text: &str,
    all: &BTreeMap<String, String>,
    reexports: &BTreeMap<&str, Vec<&str>>,
) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let names: Vec<&str> = own.split("::").collect();
    let mut resolve = |base: &[&str], rest: &str| {
        let mut paths = Vec::new();
        tree(rest, base, &mut paths);
        for mut path in paths {
            if let Some(item) =
                path.first().filter(|name| !all.contains_key(**name)).and_then(|name| reexports.get(name))
            {
                path.clone_from(item);
            }
            // The longest prefix that is a module: the rest is an item.
            let modules = (1..=path.len()).rev().map(|end| path[..end].join("::"));
            found.extend(modules.into_iter().find(|name| all.contains_key(name)).filter(|name| name != own));
        }
    };
    for (at, _) in text.match_indices("crate::") {
        resolve(&[], &text[at + "crate::".len()..]);
    }
    for (at, _) in text.match_indices("super::").filter(|(at, _)| !text[..*at].ends_with("super::")) {
        let (mut rest, mut base) = (&text[at..], &names[..]);
        while let Some(further) = rest.strip_prefix("super::") {
            (rest, base) = (further, base.split_last().map_or(&[][..], |(_, outer)| outer));
        }
        resolve(base, rest);
    }
    // A module may name its submodules without a path.
    for (at, _) in text.match_indices("use ") {
        let rest = &text[at + "use ".len()..];
        let first: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if all.contains_key(&format!("{own}::{first}")) {
            resolve(&names, rest);
        }
    }
    found
}

/// Returns a path from a module back to itself.
fn cycle(imports: &Imports) -> Option<String> {
    fn follow<'a>(
        at: &'a str,
        imports: &'a Imports,
        path: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> bool {
        if let Some(from) = path.iter().position(|one| *one == at) {
            path.drain(..from);
            path.push(at);
            return true;
        }
        if done.contains(at) {
            return false;
        }
        path.push(at);
        if imports.get(at).is_some_and(|others| others.iter().any(|other| follow(other, imports, path, done)))
        {
            return true;
        }
        path.pop();
        done.insert(at);
        false
    }
    let (mut path, mut done) = (Vec::new(), BTreeSet::new());
    let found = imports.keys().any(|module| follow(module, imports, &mut path, &mut done));
    found.then(|| path.join(" → "))
}

fn all_imports(all: &BTreeMap<String, String>, reexports: &BTreeMap<&str, Vec<&str>>) -> Imports {
    all.iter().map(|(own, text)| (own.clone(), imports(own, text, all, reexports))).collect()
}

fn crate_imports() -> Imports {
    let mut all = BTreeMap::new();
    modules(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/src")), "", &mut all);
    let root = code(include_str!("../src/lib.rs"));
    all_imports(&all, &reexports(&root))
}

#[test]
fn no_file_imports_one_that_imports_it() {
    let imports = crate_imports();
    let edges: usize = imports.values().map(BTreeSet::len).sum();
    assert!(imports.len() > 40 && edges > 150, "{} files with {edges} imports were read", imports.len());
    assert!(imports["quota"].contains("db::transaction") && imports["quota"].contains("quota::row"));
    assert!(imports["db::transaction"].contains("db"), "macros count too");
    assert_eq!(cycle(&imports), None);
}

#[test]
fn a_folder_imports_only_from_folders_above_it() {
    let folder = |module: &str| module.split("::").next().unwrap_or_default().to_owned();
    let mut folders = Imports::new();
    for (own, others) in crate_imports() {
        let own = folder(&own);
        let others = others.iter().map(|other| folder(other)).filter(|other| *other != own && other != HUB);
        folders.entry(own.clone()).or_default().extend(others);
    }
    folders.remove(HUB);
    assert!(folders.len() >= 10, "{:?}", folders.keys());
    assert_eq!(cycle(&folders), None);
}

/// Without this test, the ones above could pass because they find nothing.
#[test]
fn a_cycle_is_found() {
    let root = code("mod a;\nmod b;\npub use a::x::{Item, Other};\npub use b::B; // pub use a::Z;");
    let find_cycle = |texts: &[(&str, &str)]| {
        let texts = texts.iter().map(|(name, text)| ((*name).to_owned(), code(text)));
        cycle(&all_imports(&texts.collect(), &reexports(&root)))
    };
    let b = ("b", "use std::io;\nuse crate::{c, a::{x::Y, Z}};");
    assert_eq!(
        find_cycle(&[("a", "fn f(b: crate::b::B) {}"), ("a::x", ""), b]).as_deref(),
        Some("a → b → a")
    );
    assert_eq!(find_cycle(&[("a", "// use crate::b::B;"), b, ("a::x", "use super::super::q;")]), None);
    assert_eq!(
        find_cycle(&[("a::x", "use super::super::b::B;"), ("b", "use crate::a::x;")]).as_deref(),
        Some("a::x → b → a::x")
    );
    assert_eq!(
        find_cycle(&[("a", "mod x;\nuse x::Y;"), ("a::x", "use super::Z;")]).as_deref(),
        Some("a → a::x → a")
    );
    assert_eq!(
        find_cycle(&[("a", "use x::Y;"), ("a::x", "use crate::a::Z;")]).as_deref(),
        Some("a → a::x → a")
    );
    // By the re-exports of the root.
    assert_eq!(
        find_cycle(&[("a::x", "use crate::{B, Other};"), ("b", "fn f(item: &crate::Item) {}")]).as_deref(),
        Some("a::x → b → a::x")
    );
    assert_eq!(
        find_cycle(&[("a::x", "use crate::{Item, Z};"), ("b", "use crate::{Item, B};"), ("a", "")]),
        None
    );
}
