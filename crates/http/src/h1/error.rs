//! Errors and size limits of the HTTP/1 head parser.

use http::StatusCode;

/// Size limits of a head.
#[derive(Clone, Copy, Debug)]
pub struct HeadLimits {
    /// Maximum size in bytes.
    pub bytes: usize,
    /// Maximum length of the target (path and query), in bytes.
    pub target: usize,
    /// Maximum number of fields.
    pub fields: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self { bytes: 32 * 1024, target: 8 * 1024, fields: 100 }
    }
}

/// The reason a head is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeadError {
    /// A line feed without a carriage return, or the reverse.
    #[error("every line must end with CR LF")]
    LineEnding,
    /// Not `METHOD target HTTP/1.1`.
    #[error("the request line must be: method, one space, target, one space, HTTP/1.1")]
    RequestLine,
    /// Not `HTTP/1.1 200 OK`.
    #[error("the status line must be: HTTP/1.1, one space, three digits")]
    StatusLine,
    /// Another version.
    #[error("unsupported HTTP version; use HTTP/1.1 or HTTP/1.0")]
    Version,
    /// A method that cannot be proxied (`CONNECT`).
    #[error("this method is not supported")]
    Method,
    /// A target that is not a path, or that servers could resolve to another path.
    #[error(
        "the target must be a path of visible characters, without `.` and `..` segments and without a fragment"
    )]
    Target,
    /// A target longer than [`HeadLimits::target`].
    #[error("the request target is too long")]
    TargetTooLong,
    /// More bytes or fields than [`HeadLimits`] allows.
    #[error("the header section is too large")]
    TooLarge,
    /// A field name that is not a token, is followed by a space, or has no colon.
    #[error("a field name must be a token directly followed by a colon")]
    FieldName,
    /// A field continued on the next line.
    #[error("a field must not be continued on a second line")]
    Folded,
    /// A control character.
    #[error("a field value must not contain control characters")]
    FieldValue,
    /// No `Host` field, two of them, or an invalid value.
    #[error("exactly one Host field with a valid host is required")]
    Host,
    /// Two lengths, or a value that is not a number.
    #[error("Content-Length must be a single number and occur once")]
    ContentLength,
    /// Both `Content-Length` and `Transfer-Encoding`.
    #[error("Content-Length and Transfer-Encoding are mutually exclusive")]
    TwoLengths,
    /// Another encoding than `chunked`, or one in HTTP/1.0.
    #[error("unsupported transfer encoding; use `chunked` with HTTP/1.1")]
    TransferEncoding,
    /// Another expectation than `100-continue`.
    #[error("unsupported expectation; only `100-continue` is supported")]
    Expect,
    /// `Connection` names a field that is required to read or route the message.
    #[error("Connection must not name Host, Content-Length or Transfer-Encoding")]
    Connection,
}

impl HeadError {
    /// Returns the response status for a request with this error.
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
