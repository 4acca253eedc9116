//! Errors of the program: a message, a hint, a stable code, and an exit status.

use std::path::Path;
use std::{fmt, io};

use axum::http::StatusCode;
use hearthnet_bus::calls::CallError;
use hearthnet_bus::log::{LogError, NoEffect};
use hearthnet_http::ApiError;
use hearthnet_orchestrator::{Cancel, ChatError};
use hearthnet_transport::{BindError, Code};

/// Why this node writes no events: its log is in doubt (`specs/event-log.md` 8).
pub(crate) const IN_DOUBT: &str = "the event log was restored from a backup or repaired; writing is paused \
                                   until it has synced with the other members";

/// Category of a failure; each has its own exit status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Error in this program or machine; exit 1.
    Internal,
    /// The command line or a configuration file; exit 2, as clap does.
    Config,
    /// `bad_request`: the request is invalid for this model; exit 3.
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
    /// A port, a disk or memory of this machine; exit 9. A later attempt may succeed.
    Host,
    /// The community: not a member, no right, unknown member, no answer; exit 10.
    Community,
    /// `busy` or `shutting_down`: ask again later; exit 11.
    Busy,
    /// `arithmetic_mismatch`; exit 12.
    ArithmeticMismatch,
    /// A key, a file or a folder of this machine that the user has to put right; exit 13. Unlike
    /// with [`Kind::Host`], a restart without a change fails again.
    Refused,
    /// Stopped by Ctrl-C; exit 130, as shells expect of SIGINT.
    Interrupted,
    /// The reader of the output closed it; exit 141, as shells expect of SIGPIPE.
    OutputClosed,
}

impl Kind {
    /// Exit status, and the default error code.
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

    /// Kind of an I/O error: [`Kind::Refused`] if a later attempt would fail as well.
    pub(crate) fn of_io(error: &io::Error) -> Self {
        use io::ErrorKind::{InvalidInput, IsADirectory, NotADirectory, PermissionDenied};
        match error.kind() {
            PermissionDenied | InvalidInput | IsADirectory | NotADirectory => Self::Refused,
            _ => Self::Host,
        }
    }

    /// Kind of a failure to bind an address.
    pub(crate) fn of_bind(error: &BindError) -> Self {
        match error {
            BindError::Address { source, .. } => Self::of_io(source),
            BindError::Config(_) => Self::Config,
            _ => Self::Host,
        }
    }

    pub(crate) fn exit_code(self) -> u8 {
        self.facts().0
    }

    /// Kind of an answer's error. `None` if the error concerns the call or the service, so that
    /// another attempt may succeed.
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

#[derive(Debug, Clone)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    code: Code,
    message: String,
    hint: Option<String>,
    /// Results before the failure, for `--json`: members of an object.
    found: Box<serde_json::Map<String, serde_json::Value>>,
}

/// Failure of a [`Kind`], with a formatted message.
macro_rules! failure {
    ($kind:ident, $($message:tt)+) => {
        $crate::cli::failure::Failure::new($crate::cli::failure::Kind::$kind, format!($($message)+))
    };
}
pub(crate) use failure;

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: Code::new(kind.facts().1),
            message: message.into(),
            hint: None,
            found: Box::default(),
        }
    }

    /// Adds a hint: what the user can do.
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into()).filter(|hint| !hint.is_empty());
        self
    }

    /// Prepends a possible cause to the hint.
    pub(crate) fn beside_hint(self, cause: &str) -> Self {
        let hint = match self.hint_text() {
            Some(hint) => format!("{cause}; {hint}"),
            None => cause.to_owned(),
        };
        self.hint(hint)
    }

    /// Changes the kind, and resets the code.
    pub(crate) fn of_kind(self, kind: Kind) -> Self {
        Self { kind, ..self }.code(kind.facts().1)
    }

    /// Adds an object with results before the failure to the output of `--json`.
    pub(crate) fn beside(mut self, found: serde_json::Value) -> Self {
        if let serde_json::Value::Object(found) = found {
            self.found = Box::new(found);
        }
        self
    }

    /// Sets a more specific code.
    pub(crate) fn code(mut self, code: impl Into<Code>) -> Self {
        self.code = code.into();
        self
    }

    /// Failure of an answer. Has the code of its error if that is more specific than its kind's.
    fn answer(kind: Kind, code: &Code, message: &str, hint: &str) -> Self {
        let failure = Self::new(kind, message).hint(hint);
        match *code == Code::BOUNDARY_OVERFLOW {
            true => failure.code(code.clone()),
            false => failure,
        }
    }

    pub(crate) fn has_code(&self, code: &str) -> bool {
        self.code == code
    }

    pub(crate) fn internal(error: impl fmt::Display) -> Self {
        Self::new(Kind::Internal, error.to_string())
    }

    /// Error of a file or folder operation; `what` is a verb.
    pub(crate) fn file(what: &str, path: &Path, error: impl fmt::Display) -> Self {
        Self::new(
            Kind::Host,
            format!("cannot {what} {}: {error}", path.display()),
        )
    }

    pub(crate) fn to_json(&self) -> serde_json::Value {
        let mut object = (*self.found).clone();
        let error =
            serde_json::json!({ "code": self.code, "message": self.message, "hint": self.hint });
        object.insert("error".to_owned(), error);
        object.into()
    }

    pub(crate) fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// Message with the hint, for one line of text.
    pub(crate) fn with_hint(&self) -> String {
        match &self.hint {
            Some(hint) => format!("{} ({hint})", self.message),
            None => self.message.clone(),
        }
    }

    /// Failure of an answer, from a service. `None` if the error concerns the call, or if the
    /// service cancelled without a request from here.
    pub(crate) fn of_answer(error: &CallError, cancel: &Cancel) -> Option<Self> {
        let kind = Kind::of_answer(error.code())?;
        let ours = kind != Kind::Interrupted || cancel.is_cancelled();
        ours.then(|| Self::answer(kind, error.code(), error.message(), error.hint()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

/// Error if the system refuses a thread.
pub(crate) fn no_thread(error: &dyn std::fmt::Display) -> Failure {
    failure!(Host, "the system gives this program no more threads: {error}")
    .code("no_threads")
    .hint(
        "end other programs, or raise the limit: `ulimit -u` shows that of this user, TasksMax= is that \
         of a systemd unit, pids.max that of a container",
    )
}

impl From<ChatError> for Failure {
    fn from(error: ChatError) -> Self {
        let kind = match &error {
            ChatError::ExperimentalDisabled => Kind::ExperimentalDisabled,
            ChatError::ShuttingDown => Kind::Busy,
            error => Kind::of_answer(&error.code()).unwrap_or(Kind::Internal),
        };
        Self::answer(kind, &error.code(), &error.to_string(), error.hint())
    }
}

/// Error for clients of the HTTP interface.
impl From<Failure> for ApiError {
    fn from(why: Failure) -> Self {
        let status = match why.kind {
            Kind::BadRequest | Kind::Config => StatusCode::BAD_REQUEST,
            Kind::Community => StatusCode::FORBIDDEN,
            Kind::Busy | Kind::Host => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let message = match why.hint {
            Some(hint) => format!("{}; {hint}", why.message),
            None => why.message,
        };
        Self::new(status, why.code, message)
    }
}

/// Error for local programs.
impl From<Failure> for CallError {
    fn from(why: Failure) -> Self {
        Self::new(why.code, &why.message).with_hint(why.hint.unwrap_or_default())
    }
}

impl From<LogError> for Failure {
    fn from(error: LogError) -> Self {
        use io::ErrorKind::{QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let is_full = |error: &io::Error| {
            let full = [QuotaExceeded, ReadOnlyFilesystem, StorageFull];
            full.contains(&error.kind())
        };
        let (kind, hint) = match error {
            LogError::Behind { .. } => {
                return Self::new(
                    Kind::Community,
                    IN_DOUBT,
                )
                .code(error.code())
                .hint("run `hearthnet up` in the other homes and try again; if a member will not come back, `hearthnet log resume --yes` continues without it");
            }
            LogError::Thread(_) => return no_thread(&error),
            LogError::NoEffect(NoEffect::TooManyModels | NoEffect::ModelNotAdopted) => (
                Kind::Community,
                "`hearthnet model list` shows the adopted models, `hearthnet model drop` drops one",
            ),
            LogError::NoEffect(_) => (
                Kind::Community,
                "`hearthnet community members` shows each member's level",
            ),
            LogError::Clock { .. } => (
                Kind::Community,
                "set the clock (`timedatectl set-ntp true`) and repeat the command; if the other members' clocks are wrong, disconnect this machine from the network first",
            ),
            LogError::Io { ref source, .. } if !is_full(source) => (
                Kind::of_io(source),
                "look at that file: it must be this user's regular file, on a disk that has space",
            ),
            LogError::ReadOnly { .. } | LogError::Io { .. } => (
                Kind::Host,
                "free some space on the disk of the data directory, or make it writable",
            ),
            LogError::Format { .. } => (
                Kind::Refused,
                "`hearthnet --version` shows the version of this program",
            ),
            LogError::Corrupt { .. } => (
                Kind::Refused,
                "`hearthnet restore` restores a backup; `hearthnet community leave` puts the log aside",
            ),
            _ => (Kind::Host, "`hearthnet status` shows the state of the log"),
        };
        Self::new(kind, error.to_string())
            .code(error.code())
            .hint(hint)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Self::new(Kind::OutputClosed, "output closed"),
            _ => Self::internal(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_without_a_code_of_its_own_has_that_of_its_kind() {
        let refused = Failure::new(Kind::Community, "no member answers");
        assert_eq!(refused.to_json()["error"]["code"], "community");
        assert!(refused.code("unreachable").has_code("unreachable"));
    }

    /// Codes that commands set, as scripts and clients of the daemon see them.
    #[test]
    fn a_code_reaches_a_script_and_a_client_with_its_message_and_hint() {
        for code in [
            "ambiguous_node",
            "backend_not_built",
            "bad_root_key",
            "discovery",
            "disk_budget",
            "layers_served",
            "listen",
            "model_not_measured",
            "model_unusable",
            "not_measured",
            "plan_layers",
            "plan_memory",
            "plan_no_node",
        ] {
            let failure = Failure::new(Kind::Host, "it does not work").hint("do this");
            let failure = failure.code(code);
            let error = &failure.to_json()["error"];
            let told = ["code", "message", "hint"].map(|key| error[key].as_str());
            assert_eq!(
                told,
                [Some(code), Some("it does not work"), Some("do this")]
            );
            let called = CallError::from(failure);
            let told = (called.code().as_str(), called.message(), called.hint());
            assert_eq!(told, (code, "it does not work", "do this"));
        }
    }

    #[test]
    fn a_refusal_of_the_log_ends_a_command_with_its_code_and_what_helps() {
        let path = std::path::PathBuf::from("log.sqlite");
        let author = hearthnet_bus::testing::id(1);
        let text = || "x".to_owned();
        let exists = LogError::Exists { path: path.clone() };
        for (error, code, status, hint) in [
            (exists, "community_exists", 9, "hearthnet status"),
            (
                LogError::NoCommunity { path: path.clone() },
                "no_community",
                9,
                "hearthnet status",
            ),
            (
                LogError::ReadOnly { reason: text() },
                "log_read_only",
                9,
                "free some space",
            ),
            (LogError::Busy, "log_busy", 9, "hearthnet status"),
            (
                LogError::Corrupt { what: text() },
                "log_corrupt",
                13,
                "hearthnet restore",
            ),
            (
                LogError::Format { path, found: 99 },
                "log_failed",
                13,
                "hearthnet --version",
            ),
            (
                LogError::Frozen { author },
                "log_fork",
                9,
                "hearthnet status",
            ),
            (
                LogError::Behind { author },
                "log_behind",
                10,
                "hearthnet log resume",
            ),
            (
                LogError::Clock { offset_ms: 1 },
                "clock_wrong",
                10,
                "set the clock",
            ),
            (
                LogError::Quota { author },
                "log_quota",
                9,
                "hearthnet status",
            ),
            (
                NoEffect::TooManyModels.into(),
                "model_limit",
                10,
                "hearthnet model drop",
            ),
            (
                NoEffect::ModelNotAdopted.into(),
                "model_not_adopted",
                10,
                "hearthnet model list",
            ),
            (
                NoEffect::TooManyDisputes.into(),
                "dispute_limit",
                10,
                "hearthnet community",
            ),
            (
                NoEffect::NoSuchDispute.into(),
                "no_dispute",
                10,
                "hearthnet community",
            ),
        ] {
            let failure = Failure::from(error);
            assert!(failure.has_code(code), "{failure:?}");
            assert_eq!(failure.kind.exit_code(), status, "{code}");
            assert!(failure.hint_text().unwrap().contains(hint), "{failure:?}");
        }
    }

    #[test]
    fn a_stop_and_a_closed_output_end_with_the_status_of_their_signal() {
        let stopped = Failure::from(ChatError::Cancelled);
        assert!(stopped.has_code("interrupted") && stopped.kind.exit_code() == 130);
        let closed = Failure::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(closed.has_code("output_closed") && closed.kind.exit_code() == 141);
    }

    #[test]
    fn a_refused_thread_names_the_limits_to_raise() {
        let why = no_thread(&io::Error::from(io::ErrorKind::WouldBlock));
        assert!(why.has_code("no_threads") && why.kind == Kind::Host);
        assert!(why.with_hint().contains("`ulimit -u`"));
    }

    #[test]
    fn a_line_of_text_has_the_hint_behind_the_message() {
        let failure = Failure::new(Kind::Host, "the disk is full");
        assert_eq!(failure.with_hint(), "the disk is full");
        let failure = failure.hint("free some space");
        assert_eq!(failure.with_hint(), "the disk is full (free some space)");
    }
}
