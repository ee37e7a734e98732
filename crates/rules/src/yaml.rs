//! YAML as a tree in which every node knows where it stands.
//!
//! The parser's events become nodes with line and column, so that the decoder can point at anything. Deriving the
//! decoding from types was rejected: where several forms are allowed (`limit: 10/second`, a list, a mapping) it loses
//! the place, and its messages speak of variants. Depth, nodes and what aliases may multiply are bounded.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// A place in a file, in characters, from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct At {
    pub(crate) line: u32,
    pub(crate) column: u32,
    /// Characters that it covers on its line; zero if unknown.
    pub(crate) width: u32,
}

impl From<Span> for At {
    fn from(span: Span) -> Self {
        let small = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let same_line = span.start.line() == span.end.line();
        Self {
            line: small(span.start.line()),
            column: small(span.start.col() + 1),
            width: if same_line { small(span.len()) } else { 0 },
        }
    }
}

/// A node and its place.
#[derive(Clone, Debug)]
pub(crate) struct Node<'t> {
    pub(crate) at: At,
    pub(crate) value: Value<'t>,
}

/// What a node is.
#[derive(Clone, Debug)]
pub(crate) enum Value<'t> {
    /// Text. Only plain text (no quotes) can mean a number, a boolean or null.
    Scalar {
        text: Cow<'t, str>,
        plain: bool,
    },
    Sequence(Vec<Node<'t>>),
    /// Keys are text; no key stands twice.
    Mapping(Vec<(Node<'t>, Node<'t>)>),
}

impl Node<'_> {
    /// Whether this is YAML's null, which means the same as leaving the key out.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.value, Value::Scalar { text, plain: true }
            if matches!(&**text, "" | "~" | "null" | "Null" | "NULL"))
    }

    /// What it is, in words.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.value {
            _ if self.is_null() => "nothing",
            Value::Scalar { plain: false, .. } => "a quoted text",
            Value::Scalar { .. } => "a plain value",
            Value::Sequence(_) => "a list",
            Value::Mapping(_) => "a mapping",
        }
    }

    fn weight(&self) -> usize {
        match &self.value {
            Value::Scalar { text, .. } => 1 + text.len() / 64,
            Value::Sequence(items) => 1 + items.iter().map(Node::weight).sum::<usize>(),
            Value::Mapping(pairs) => 1 + pairs.iter().map(|(k, v)| k.weight() + v.weight()).sum::<usize>(),
        }
    }
}

/// A file that is no YAML, or too much of it.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub(crate) at: At,
    pub(crate) message: String,
    pub(crate) help: Option<&'static str>,
}

/// Larger files are refused unread.
pub(crate) const LARGEST_FILE: usize = 64 << 20;
/// YAML nesting: two levels for each of the 32 that descriptors may have, and some for what stands in them.
const DEEPEST: usize = 72;
const MOST_NODES: usize = 8 << 20;
/// Nodes that all aliases together may repeat.
const MOST_REPEATED: usize = 1 << 18;
/// Nodes that all anchors together may hold.
const MOST_ANCHORED: usize = 1 << 20;
/// Keys of a mapping that others are merged into.
const MOST_MERGED: usize = 1_000;

/// Reads a file of one document. `None` if it is empty.
pub(crate) fn parse(text: &str) -> Result<Option<Node<'_>>, SyntaxError> {
    if text.len() > LARGEST_FILE {
        return Err(refuse(At { line: 1, column: 1, width: 1 }, "the file is larger than 64 MiB", None));
    }
    let mut builder = Builder {
        parser: Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text)),
        anchors: HashMap::new(),
        nodes: 0,
        repeated: 0,
        anchored: 0,
    };
    let mut document = None;
    loop {
        let (event, span) = builder.next()?;
        match event {
            Event::StreamEnd => return Ok(document),
            Event::DocumentStart(_) if document.is_some() => {
                return Err(refuse(
                    span,
                    "a rule file holds one document",
                    Some("put each domain in a file of its own"),
                ));
            }
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            event => document = Some(builder.node(event, span, 0)?),
        }
    }
}

fn refuse(at: impl Into<At>, message: impl Into<String>, help: Option<&'static str>) -> SyntaxError {
    SyntaxError { at: at.into(), message: message.into(), help }
}

struct Builder<'t> {
    parser: Parser<'t, StrInput<'t>>,
    anchors: HashMap<usize, Node<'t>>,
    nodes: usize,
    repeated: usize,
    anchored: usize,
}

impl<'t> Builder<'t> {
    fn next(&mut self) -> Result<(Event<'t>, Span), SyntaxError> {
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(scan_error(&error)),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<Node<'t>, SyntaxError> {
        self.nodes += 1;
        if self.nodes > MOST_NODES {
            return Err(refuse(span, "the file has more than 8 million values", None));
        }
        if depth > DEEPEST {
            return Err(refuse(span, "nested too deeply", Some("descriptors may be nested 32 deep")));
        }
        let at = At::from(span);
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let as_text = tag.as_ref().is_some_and(|tag| tag.suffix == "str");
                self.known_tag(tag.as_deref(), span)?;
                (anchor, Value::Scalar { text, plain: style == ScalarStyle::Plain && !as_text })
            }
            Event::SequenceStart(anchor, tag) => {
                self.known_tag(tag.as_deref(), span)?;
                (anchor, Value::Sequence(self.items(depth)?))
            }
            Event::MappingStart(anchor, tag) => {
                self.known_tag(tag.as_deref(), span)?;
                (anchor, Value::Mapping(self.pairs(depth)?))
            }
            Event::Alias(anchor) => return self.repeat(anchor, span),
            _ => return Err(refuse(span, "a value is missing here", None)),
        };
        let node = Node { at, value };
        if anchor > 0 {
            // Anchors inside anchors are each kept whole.
            self.anchored += node.weight();
            if self.anchored > MOST_ANCHORED {
                return Err(refuse(span, "the anchors hold too much", Some("write the values out")));
            }
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn items(&mut self, depth: usize) -> Result<Vec<Node<'t>>, SyntaxError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(Node<'t>, Node<'t>)>, SyntaxError> {
        let mut pairs: Vec<(Node<'t>, Node<'t>)> = Vec::new();
        let mut merged = Vec::new();
        let mut seen = Seen::default();
        loop {
            let key = match self.next()? {
                (Event::MappingEnd, _) => break,
                (event, span) => self.node(event, span, depth + 1)?,
            };
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            let Value::Scalar { text, plain } = &key.value else {
                return Err(refuse(key.at, format!("a key must be text, not {}", key.kind()), None));
            };
            if *plain && text == "<<" {
                merged.push(value);
                continue;
            }
            if seen.repeats(&pairs, text) {
                let message = format!("the key `{}` stands twice in one mapping", shorten(text));
                return Err(refuse(key.at, message, Some("keep one of them")));
            }
            pairs.push((key, value));
        }
        for node in merged {
            merge(&mut pairs, node)?;
        }
        Ok(pairs)
    }

    fn repeat(&mut self, anchor: usize, span: Span) -> Result<Node<'t>, SyntaxError> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(refuse(span, "an alias inside what it stands for", Some("write the value out")));
        };
        self.repeated += node.weight();
        if self.repeated > MOST_REPEATED {
            return Err(refuse(span, "the aliases repeat too much", Some("write the values out")));
        }
        // Cloned where it is used: an error in it points at the anchor, where the text stands.
        Ok(node.clone())
    }

    fn known_tag(&self, tag: Option<&saphyr_parser::Tag>, span: Span) -> Result<(), SyntaxError> {
        match tag {
            Some(tag) if !tag.is_yaml_core_schema() => Err(refuse(
                span,
                format!("the tag `{}` means nothing here", shorten(&tag.to_string())),
                Some("leave it out"),
            )),
            _ => Ok(()),
        }
    }
}

/// `<<: *base`: what the base has and the mapping itself has not.
fn merge<'t>(pairs: &mut Vec<(Node<'t>, Node<'t>)>, node: Node<'t>) -> Result<(), SyntaxError> {
    match node.value {
        Value::Mapping(base) if base.len() + pairs.len() > MOST_MERGED => {
            Err(refuse(node.at, "too many keys to merge", Some("write the mapping out")))
        }
        Value::Mapping(base) => {
            for (key, value) in base {
                let own = pairs.iter().any(|(own, _)| text_of(own) == text_of(&key));
                if !own {
                    pairs.push((key, value));
                }
            }
            Ok(())
        }
        Value::Sequence(bases) => bases.into_iter().try_for_each(|base| merge(pairs, base)),
        Value::Scalar { .. } => Err(refuse(node.at, "`<<` takes a mapping", Some("write `<<: *name`"))),
    }
}

fn text_of<'n>(node: &'n Node<'_>) -> &'n str {
    match &node.value {
        Value::Scalar { text, .. } => text,
        _ => "",
    }
}

/// Finds repeated keys: by looking while there are few, by a set beyond.
#[derive(Default)]
struct Seen {
    set: HashSet<String>,
}

impl Seen {
    const FEW: usize = 32;

    fn repeats(&mut self, pairs: &[(Node<'_>, Node<'_>)], key: &str) -> bool {
        if pairs.len() < Self::FEW {
            return pairs.iter().any(|(seen, _)| text_of(seen) == key);
        }
        if self.set.is_empty() {
            self.set.extend(pairs.iter().map(|(seen, _)| text_of(seen).to_owned()));
        }
        !self.set.insert(key.to_owned())
    }
}

fn scan_error(error: &ScanError) -> SyntaxError {
    let mark = error.marker();
    let at = At::from(Span::empty(*mark));
    let help = error.info().contains("tab").then_some("indent with spaces; YAML allows no tabs there");
    refuse(at, format!("not valid YAML: {}", error.info()), help)
}

/// Text from a file as it may stand in a message.
pub(crate) fn shorten(text: &str) -> String {
    const MOST: usize = 60;
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= MOST {
        clean.collect()
    } else {
        clean.take(MOST).chain("...".chars()).collect()
    }
}
