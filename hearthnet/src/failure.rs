//! How the program fails: one sentence, one hint, a stable code, an exit status.

use std::fmt;
use std::io;
use std::path::Path;

use hearthnet_bus::calls::CallError;
use hearthnet_bus::log::LogError;
use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_transport::Code;

use crate::runtime::no_thread;

/// What kind of failure it is; each has its own exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Something in this program or machine; exit 1.
    Internal,
    /// The command line or a configuration file; exit 2, as clap does.
    Config,
    /// `bad_request`: the request makes no sense for this model; exit 3.
    BadRequest,
    /// `shard_unavailable`; exit 4.
    ShardUnavailable,
    /// `pipeline_stalled`; exit 5.
    PipelineStalled,
    /// `weights_mismatch`; exit 6.
    WeightsMismatch,
    /// `experimental_disabled`; exit 7.
    ExperimentalDisabled,
    /// A model file is missing, broken or could not be fetched; exit 8.
    Model,
    /// A port, a disk or memory of this machine; exit 9. It may be free the next time.
    Host,
    /// The community: not in one, no right to, no such member, nobody answers; exit 10.
    Community,
    /// `busy` or `shutting_down`: ask again later; exit 11.
    Busy,
    /// `arithmetic_mismatch`; exit 12.
    ArithmeticMismatch,
    /// A key, a file or a folder of this machine that a person has to put right; exit 13. Unlike with
    /// [`Kind::Host`], it is of no use to start again before that.
    Refused,
    /// Stopped by Ctrl-C; exit 130, as shells expect of SIGINT.
    Interrupted,
    /// Whoever read our output went away; exit 141, as shells expect of SIGPIPE.
    OutputClosed,
}

impl Kind {
    /// The exit status of the process, and the stable code unless something closer is known.
    fn facts(self) -> (u8, &'static str) {
        match self {
            Self::Internal => (1, "internal"),
            Self::Config => (2, "bad_config"),
            Self::BadRequest => (3, "bad_request"),
            Self::ShardUnavailable => (4, "shard_unavailable"),
            Self::PipelineStalled => (5, "pipeline_stalled"),
            Self::WeightsMismatch => (6, "weights_mismatch"),
            Self::ExperimentalDisabled => (7, "experimental_disabled"),
            Self::Model => (8, "model_unavailable"),
            Self::Host => (9, "host_failed"),
            Self::Community => (10, "community"),
            Self::Busy => (11, "busy"),
            Self::ArithmeticMismatch => (12, "arithmetic_mismatch"),
            Self::Refused => (13, "host_refused"),
            Self::Interrupted => (130, "interrupted"),
            Self::OutputClosed => (141, "output_closed"),
        }
    }

    /// What the system says of a file, a folder or an address: whether it may be different the next
    /// time.
    pub(crate) fn of_io(error: &io::Error) -> Self {
        use io::ErrorKind::{InvalidInput, IsADirectory, NotADirectory, PermissionDenied};
        match error.kind() {
            PermissionDenied | InvalidInput | IsADirectory | NotADirectory => Self::Refused,
            _ => Self::Host,
        }
    }

    /// Exit status of the process.
    pub(crate) fn exit_code(self) -> u8 {
        self.facts().0
    }

    /// What the code says with which an answer failed; `None` where it is about the call, or about
    /// a node that will not: another may do better.
    fn of_answer(code: &Code) -> Option<Self> {
        let known = [
            Self::BadRequest,
            Self::ShardUnavailable,
            Self::PipelineStalled,
            Self::WeightsMismatch,
            Self::ArithmeticMismatch,
            Self::Busy,
        ];
        match code.as_str() {
            "cancelled" => Some(Self::Interrupted),
            "engine_failed" => Some(Self::Internal),
            "boundary_overflow" => Some(Self::BadRequest),
            code => known.into_iter().find(|kind| kind.facts().1 == code),
        }
    }
}

/// A failure as the user sees it.
#[derive(Debug, Clone)]
pub(crate) struct Failure {
    /// Which exit status.
    pub(crate) kind: Kind,
    code: Code,
    message: String,
    hint: Option<String>,
    /// What was found out before it failed, for `--json`: members of an object.
    found: serde_json::Map<String, serde_json::Value>,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: Code::new(kind.facts().1),
            message: message.into(),
            hint: None,
            found: serde_json::Map::new(),
        }
    }

    /// Adds what the user can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into()).filter(|hint| !hint.is_empty());
        self
    }

    /// Puts something that may be the cause in front of the hint.
    pub(crate) fn beside_hint(self, cause: &str) -> Self {
        let hint = match self.hint_text() {
            Some(hint) => format!("{cause}; {hint}"),
            None => cause.to_owned(),
        };
        self.hint(hint)
    }

    /// The same of another kind.
    pub(crate) fn of_kind(self, kind: Kind) -> Self {
        Self { kind, ..self }.code(kind.facts().1)
    }

    /// Adds what was found out all the same, an object, to what `--json` prints.
    pub(crate) fn beside(mut self, found: serde_json::Value) -> Self {
        if let serde_json::Value::Object(found) = found {
            self.found = found;
        }
        self
    }

    /// Names the cause more closely than its kind does.
    pub(crate) fn code(mut self, code: impl Into<Code>) -> Self {
        self.code = code.into();
        self
    }

    /// Names the cause of an answer's failure where its kind has a wider code.
    fn of_model(self, code: &Code) -> Self {
        match *code == Code::BOUNDARY_OVERFLOW {
            true => self.code(code.clone()),
            false => self,
        }
    }

    /// Whether this is its code.
    pub(crate) fn has_code(&self, code: &str) -> bool {
        self.code == code
    }

    pub(crate) fn internal(error: impl fmt::Display) -> Self {
        Self::new(Kind::Internal, error.to_string())
    }

    /// Something could not be done with a file or a folder of this machine: `what` is a verb.
    pub(crate) fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self::new(
            Kind::Host,
            format!("cannot {what} {}: {error}", path.display()),
        )
    }

    /// The failure as one JSON object, for `--json`.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let mut object = self.found.clone();
        let error =
            serde_json::json!({ "code": self.code, "message": self.message, "hint": self.hint });
        object.insert("error".to_owned(), error);
        object.into()
    }

    /// The hint, if there is one.
    pub(crate) fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl Failure {
    /// What a service that was asked says about the answer, whoever is asked; `None` if it is about
    /// the call, or if nobody here has cancelled what it gave up.
    pub(crate) fn of_answer(error: &CallError, cancel: &Cancel) -> Option<Self> {
        let kind = Kind::of_answer(error.code())?;
        let ours = kind != Kind::Interrupted || cancel.is_cancelled();
        ours.then(|| {
            Self::new(kind, error.message())
                .of_model(error.code())
                .hint(error.hint())
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<ChatError> for Failure {
    fn from(error: ChatError) -> Self {
        let kind = match &error {
            ChatError::ExperimentalDisabled => Kind::ExperimentalDisabled,
            ChatError::ShuttingDown => Kind::Busy,
            error => Kind::of_answer(&error.code()).unwrap_or(Kind::Internal),
        };
        let failure = Self::new(kind, error.to_string()).of_model(&error.code());
        failure.hint(error.hint())
    }
}

/// As a program on this machine is told.
impl From<Failure> for CallError {
    fn from(why: Failure) -> Self {
        Self::new(why.code, &why.message).with_hint(why.hint.unwrap_or_default())
    }
}

const MAKE_WRITABLE: &str =
    "free some space where the data directory is, or let its disk be written";

fn is_disk_full_or_read_only(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    matches!(
        error.kind(),
        QuotaExceeded | ReadOnlyFilesystem | StorageFull
    )
}

/// What went wrong with the log.
impl From<LogError> for Failure {
    fn from(error: LogError) -> Self {
        let (kind, hint) = match error {
            LogError::Behind { .. } => {
                return Self::new(
                    Kind::Community,
                    "this copy of the community's log was put back or mended, and no other member has said yet what it lacks",
                )
                .code(error.code())
                .hint("start `hearthnet serve` in another home and try again; if nobody else is left, `hearthnet log resume --yes` goes on without asking");
            }
            LogError::Thread(_) => return no_thread(&error),
            LogError::NoEffect(_) => (
                Kind::Community,
                "`hearthnet community members` shows who is what",
            ),
            LogError::Clock { .. } => (
                Kind::Community,
                "set the clock (`timedatectl set-ntp true`) and repeat the command; if it is the others' that are wrong, take this machine off the network first",
            ),
            LogError::ReadOnly { .. } => (Kind::Host, MAKE_WRITABLE),
            LogError::Io { ref source, .. } if is_disk_full_or_read_only(source) => {
                (Kind::Host, MAKE_WRITABLE)
            }
            LogError::Format { .. } => (
                Kind::Refused,
                "`hearthnet --version` shows the version of this program",
            ),
            LogError::Corrupt { .. } => (
                Kind::Refused,
                "`hearthnet restore` brings a backup back; `hearthnet community leave` gives the log up",
            ),
            LogError::Io { ref source, .. } => (
                Kind::of_io(source),
                "look at that file: it must be this user's regular file, on a disk that has space",
            ),
            _ => (Kind::Host, "`hearthnet status` shows the state of the log"),
        };
        Self::new(kind, error.to_string())
            .code(error.code())
            .hint(hint)
    }
}

/// Writing to standard output failed.
impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Self::new(Kind::OutputClosed, "output closed"),
            _ => Self::internal(error),
        }
    }
}
