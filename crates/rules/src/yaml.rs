//! YAML parser whose nodes carry their positions.
//!
//! The parser's events become nodes with line and column, so that the decoder can report any position. Rejected:
//! decoding derived from types, because where several forms are allowed (`limit: 10/second`, a list, a mapping) it
//! loses the position, and its messages mention variants. Depth, node count and alias expansion are bounded.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError, Span, StrInput};
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

/// A position in a file, in characters, starting at 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) line: u32,
    pub(crate) column: u32,
    /// Number of characters covered on the line; zero if unknown.
    pub(crate) width: u32,
}

impl From<Span> for Position {
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

/// A node and its position.
#[derive(Clone, Debug)]
pub(crate) struct YamlNode<'t> {
    pub(crate) at: Position,
    pub(crate) value: YamlValue<'t>,
}

/// The value of a node.
#[derive(Clone, Debug)]
pub(crate) enum YamlValue<'t> {
    /// Text. Only plain text (no quotes) can mean a number, a boolean or null.
    Scalar {
        text: Cow<'t, str>,
        plain: bool,
    },
    Sequence(Vec<YamlNode<'t>>),
    /// Pairs of key and value. Keys are text; no key occurs twice.
    Mapping(Vec<(YamlNode<'t>, YamlNode<'t>)>),
}

impl YamlNode<'_> {
    /// Returns whether this is YAML's null, which means the same as leaving the key out.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.value, YamlValue::Scalar { text, plain: true }
            if matches!(&**text, "" | "~" | "null" | "Null" | "NULL"))
    }

    /// Returns a description of the value's type.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.value {
            _ if self.is_null() => "nothing",
            YamlValue::Scalar { plain: false, .. } => "a quoted text",
            YamlValue::Scalar { .. } => "a plain value",
            YamlValue::Sequence(_) => "a list",
            YamlValue::Mapping(_) => "a mapping",
        }
    }

    fn weight(&self) -> usize {
        match &self.value {
            YamlValue::Scalar { text, .. } => 1 + text.len() / 64,
            YamlValue::Sequence(items) => 1 + items.iter().map(YamlNode::weight).sum::<usize>(),
            YamlValue::Mapping(pairs) => {
                1 + pairs.iter().map(|(k, v)| k.weight() + v.weight()).sum::<usize>()
            }
        }
    }
}

/// The error for a file that is not valid YAML or exceeds a bound.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub(crate) at: Position,
    pub(crate) message: String,
    pub(crate) help: Option<&'static str>,
}

/// The maximum file size; larger files are rejected unread.
pub(crate) const MAX_FILE_BYTES: usize = 64 << 20;
/// The maximum YAML nesting: two levels for each of the 32 that descriptors may have, and some for their contents.
const MAX_DEPTH: usize = 72;
const MAX_NODES: usize = 8 << 20;
/// The maximum number of nodes that all aliases together may repeat.
const MAX_REPEATED: usize = 1 << 18;
/// The maximum number of nodes that all anchors together may contain.
const MAX_ANCHORED: usize = 1 << 20;
/// The maximum number of keys in a mapping that others are merged into.
const MAX_MERGED: usize = 1_000;

/// The maximum number of mistakes that are tolerated.
const MAX_TOLERATED: usize = 100;

/// What to do about a file that means something to one reader of YAML and is wrong to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// It is an error.
    Strict,
    /// It means what it means to Go's reader: the first document counts, and the last of several equal keys.
    AsGo,
}

/// A parsed file.
#[derive(Debug)]
pub(crate) struct Document<'t> {
    /// `None` if the file is empty.
    pub(crate) root: Option<YamlNode<'t>>,
    /// What would be an error if it were not tolerated.
    pub(crate) tolerated: Vec<SyntaxError>,
}

/// Parses a file of one document.
pub(crate) fn parse(text: &str, strictness: Strictness) -> Result<Document<'_>, SyntaxError> {
    if text.len() > MAX_FILE_BYTES {
        return Err(reject(
            Position { line: 1, column: 1, width: 1 },
            "the file is larger than 64 MiB",
            None,
        ));
    }
    let mut builder = Builder {
        parser: Parser::new_from_str(text.strip_prefix('\u{feff}').unwrap_or(text)),
        anchors: HashMap::new(),
        nodes: 0,
        repeated: 0,
        anchored: 0,
        strictness,
        tolerated: Vec::new(),
    };
    let mut root = None;
    loop {
        let (event, span) = builder.next()?;
        match event {
            Event::StreamEnd => return Ok(Document { root, tolerated: builder.tolerated }),
            Event::DocumentStart(_) if root.is_some() => {
                let help = Some("put each domain in a file of its own");
                builder.tolerate(reject(span, "a rule file holds one document", help))?;
                return Ok(Document { root, tolerated: builder.tolerated });
            }
            Event::StreamStart | Event::DocumentStart(_) | Event::DocumentEnd | Event::Nothing => {}
            event => root = Some(builder.node(event, span, 0)?),
        }
    }
}

fn reject(at: impl Into<Position>, message: impl Into<String>, help: Option<&'static str>) -> SyntaxError {
    SyntaxError { at: at.into(), message: message.into(), help }
}

struct Builder<'t> {
    parser: Parser<'t, StrInput<'t>>,
    anchors: HashMap<usize, YamlNode<'t>>,
    nodes: usize,
    repeated: usize,
    anchored: usize,
    strictness: Strictness,
    tolerated: Vec<SyntaxError>,
}

impl<'t> Builder<'t> {
    /// Returns the error, unless it is tolerated.
    fn tolerate(&mut self, error: SyntaxError) -> Result<(), SyntaxError> {
        if self.strictness == Strictness::Strict || self.tolerated.len() == MAX_TOLERATED {
            return Err(error);
        }
        self.tolerated.push(error);
        Ok(())
    }

    fn next(&mut self) -> Result<(Event<'t>, Span), SyntaxError> {
        match self.parser.next_event() {
            Some(Ok(event)) => Ok(event),
            Some(Err(error)) => Err(scan_error(&error)),
            None => Ok((Event::StreamEnd, Span::default())),
        }
    }

    fn node(&mut self, event: Event<'t>, span: Span, depth: usize) -> Result<YamlNode<'t>, SyntaxError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            return Err(reject(span, "the file has more than 8 million values", None));
        }
        if depth > MAX_DEPTH {
            return Err(reject(span, "nested too deeply", Some("descriptors may be nested 32 deep")));
        }
        let at = Position::from(span);
        let (anchor, value) = match event {
            Event::Scalar(text, style, anchor, tag) => {
                let as_text = tag.as_ref().is_some_and(|tag| tag.suffix == "str");
                self.known_tag(tag.as_deref(), span)?;
                (anchor, YamlValue::Scalar { text, plain: style == ScalarStyle::Plain && !as_text })
            }
            Event::SequenceStart(anchor, tag) => {
                self.known_tag(tag.as_deref(), span)?;
                (anchor, YamlValue::Sequence(self.items(depth)?))
            }
            Event::MappingStart(anchor, tag) => {
                self.known_tag(tag.as_deref(), span)?;
                (anchor, YamlValue::Mapping(self.pairs(depth)?))
            }
            Event::Alias(anchor) => return self.repeat(anchor, span),
            _ => return Err(reject(span, "a value is missing here", None)),
        };
        let node = YamlNode { at, value };
        if anchor > 0 {
            // Nested anchors are each stored in full.
            self.anchored += node.weight();
            if self.anchored > MAX_ANCHORED {
                return Err(reject(span, "the anchors hold too much", Some("write the values out")));
            }
            self.anchors.insert(anchor, node.clone());
        }
        Ok(node)
    }

    fn items(&mut self, depth: usize) -> Result<Vec<YamlNode<'t>>, SyntaxError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, span, depth + 1)?),
            }
        }
    }

    fn pairs(&mut self, depth: usize) -> Result<Vec<(YamlNode<'t>, YamlNode<'t>)>, SyntaxError> {
        let mut pairs: Vec<(YamlNode<'t>, YamlNode<'t>)> = Vec::new();
        let mut merged = Vec::new();
        let mut seen = SeenKeys::default();
        loop {
            let key = match self.next()? {
                (Event::MappingEnd, _) => break,
                (event, span) => self.node(event, span, depth + 1)?,
            };
            let (event, span) = self.next()?;
            let value = self.node(event, span, depth + 1)?;
            let YamlValue::Scalar { text, plain } = &key.value else {
                return Err(reject(key.at, format!("a key must be text, not {}", key.kind()), None));
            };
            if *plain && text == "<<" {
                merged.push(value);
                continue;
            }
            if seen.repeats(&pairs, text) {
                let message = format!("duplicate key `{}` in one mapping", shorten(text));
                self.tolerate(reject(key.at, message, Some("keep one of them")))?;
                if let Some(first) = pairs.iter_mut().find(|(seen, _)| text_of(seen) == text) {
                    *first = (key, value);
                }
                continue;
            }
            pairs.push((key, value));
        }
        for node in merged {
            merge(&mut pairs, node)?;
        }
        Ok(pairs)
    }

    fn repeat(&mut self, anchor: usize, span: Span) -> Result<YamlNode<'t>, SyntaxError> {
        let Some(node) = self.anchors.get(&anchor) else {
            return Err(reject(span, "an alias inside what it stands for", Some("write the value out")));
        };
        self.repeated += node.weight();
        if self.repeated > MAX_REPEATED {
            return Err(reject(span, "the aliases repeat too much", Some("write the values out")));
        }
        // Cloned where it is used: an error in it points at the anchor, which contains the text.
        Ok(node.clone())
    }

    fn known_tag(&self, tag: Option<&saphyr_parser::Tag>, span: Span) -> Result<(), SyntaxError> {
        match tag {
            Some(tag) if !tag.is_yaml_core_schema() => Err(reject(
                span,
                format!("the tag `{}` means nothing here", shorten(&tag.to_string())),
                Some("leave it out"),
            )),
            _ => Ok(()),
        }
    }
}

/// Merges `<<: *base`: adds the keys of the base that the mapping itself does not have.
fn merge<'t>(pairs: &mut Vec<(YamlNode<'t>, YamlNode<'t>)>, node: YamlNode<'t>) -> Result<(), SyntaxError> {
    match node.value {
        YamlValue::Mapping(base) if base.len() + pairs.len() > MAX_MERGED => {
            Err(reject(node.at, "too many keys to merge", Some("write the mapping out")))
        }
        YamlValue::Mapping(base) => {
            for (key, value) in base {
                let own = pairs.iter().any(|(own, _)| text_of(own) == text_of(&key));
                if !own {
                    pairs.push((key, value));
                }
            }
            Ok(())
        }
        YamlValue::Sequence(bases) => bases.into_iter().try_for_each(|base| merge(pairs, base)),
        YamlValue::Scalar { .. } => Err(reject(node.at, "`<<` takes a mapping", Some("write `<<: *name`"))),
    }
}

fn text_of<'n>(node: &'n YamlNode<'_>) -> &'n str {
    match &node.value {
        YamlValue::Scalar { text, .. } => text,
        _ => "",
    }
}

/// Finds repeated keys: by linear search while there are few, by a set beyond that.
#[derive(Default)]
struct SeenKeys {
    set: HashSet<String>,
}

impl SeenKeys {
    const MAX_LINEAR: usize = 32;

    fn repeats(&mut self, pairs: &[(YamlNode<'_>, YamlNode<'_>)], key: &str) -> bool {
        if pairs.len() < Self::MAX_LINEAR {
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
    let at = Position::from(Span::empty(*mark));
    let help = error.info().contains("tab").then_some("indent with spaces; YAML allows no tabs there");
    reject(at, format!("not valid YAML: {}", error.info()), help)
}

/// Formats text from a file for use in a message.
pub(crate) fn shorten(text: &str) -> String {
    const MAX_CHARS: usize = 60;
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    if text.chars().count() <= MAX_CHARS {
        clean.collect()
    } else {
        clean.take(MAX_CHARS).chain("...".chars()).collect()
    }
}
