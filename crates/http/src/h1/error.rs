//! Why a head is refused, how its sender is answered, and how much of one is read.

use http::StatusCode;

/// How much of a head is read.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Bytes in all.
    pub bytes: usize,
    /// Bytes of the target: path and query.
    pub target: usize,
    /// Fields.
    pub fields: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self { bytes: 32 * 1024, target: 8 * 1024, fields: 100 }
    }
}

/// Why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// A line feed without its carriage return, or the other way round.
    #[error("every line must end with CR LF")]
    LineEnding,
    /// Not `METHOD target HTTP/1.1`.
    #[error("the request line must be: method, one space, target, one space, HTTP/1.1")]
    RequestLine,
    /// Not `HTTP/1.1 200 OK`.
    #[error("the status line must be: HTTP/1.1, one space, three digits")]
    StatusLine,
    /// Another version.
    #[error("only HTTP/1.1 and HTTP/1.0 are spoken here")]
    Version,
    /// A method that no route can have.
    #[error("this method is not passed on")]
    Method,
    /// A target that is not a path, or hides what path it is.
    #[error(
        "the target must be a path of visible characters, without `.` and `..` segments and without a fragment"
    )]
    Target,
    /// Longer than is read.
    #[error("the target is longer than is read here")]
    TargetTooLong,
    /// More bytes or fields than are read.
    #[error("the header section is larger than is read here")]
    TooLarge,
    /// Not a token before the colon, a space before it, or none.
    #[error("a field's name must be a token directly followed by a colon")]
    FieldName,
    /// A field continued on the next line.
    #[error("a field may not be continued on a second line")]
    Folded,
    /// A control character.
    #[error("a field's value may not have control characters")]
    FieldValue,
    /// None, two, or one that is no host.
    #[error("exactly one Host field with a host's name is needed")]
    Host,
    /// Two lengths, or no number.
    #[error("Content-Length must be one number, once")]
    ContentLength,
    /// The two ways to tell a length at once.
    #[error("Content-Length and Transfer-Encoding exclude each other")]
    TwoLengths,
    /// Another encoding than `chunked`, or one in HTTP/1.0.
    #[error("the only transfer encoding understood here is `chunked`, in HTTP/1.1")]
    TransferEncoding,
    /// Another expectation than `100-continue`.
    #[error("the only expectation understood here is `100-continue`")]
    Expect,
    /// `Connection` names a field that the message cannot do without.
    #[error("Connection may not name a field that frames or directs the message")]
    Connection,
}

impl HeadError {
    /// The answer to a caller who sent this.
    #[must_use]
    pub const fn status(self) -> StatusCode {
        match self {
            Self::Version => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            Self::Method | Self::TransferEncoding => StatusCode::NOT_IMPLEMENTED,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::TooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}
