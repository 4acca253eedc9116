//! `hearthnet pause` and `hearthnet resume`: whether this node serves layers to others.

use hearthnet_platform::machine::local_time;

use crate::cli::args::PauseArgs;
use crate::cli::{Failure, Kind, print_result};
use crate::config::Context;
use crate::daemon::pause::request;
use crate::home::{Paused, next_time, now_ms};
use crate::node::open_home;

pub(crate) fn pause(args: &PauseArgs, cx: &Context) -> Result<(), Failure> {
    let now = now_ms();
    let until_ms = match (args.duration, args.until) {
        (Some(duration), _) => {
            let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
            Some(now.saturating_add(ms))
        }
        (None, Some(time)) => {
            let next = next_time(time, now, local_time);
            Some(next.ok_or_else(|| {
                Failure::new(Kind::Host, "this machine does not tell its local time")
                    .hint("give a time span instead: --for 2h")
            })?)
        }
        (None, None) => None,
    };
    let paused = Paused { until_ms };
    request(&open_home(cx)?, Some(paused))?;
    print_result(args.json, &paused, || {
        format!(
            "{paused}: this node serves no layers to others; your own chats go on\n\
             `hearthnet resume` ends that\n"
        )
    })
}

pub(crate) fn resume(json: bool, cx: &Context) -> Result<(), Failure> {
    request(&open_home(cx)?, None)?;
    print_result(json, &serde_json::json!({}), || {
        "no longer paused: this node serves layers again, as its settings say\n".to_owned()
    })
}
