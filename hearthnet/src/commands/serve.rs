//! `hearthnet serve`: the daemon of a home, for the community and for programs on this machine.

use crate::args::RunArgs;
use crate::commands::serve_standalone;
use crate::community::Home;
use crate::context::Context;
use crate::daemon::{self, Plan};
use crate::failure::Failure;

pub(crate) fn run(args: RunArgs, cx: &Context) -> Result<(), Failure> {
    if args.answers.is_standalone() {
        return serve_standalone::run(args, cx);
    }
    let home = Home::open(cx)?;
    let plan = Plan {
        model: args.model,
        layers: args.layers,
        threads: None,
        for_layers: false,
        listen: args.listen,
        http: args.answers.http,
        private: args.answers.private,
        metrics: None,
        json: args.json,
        lifeline: args.lifeline,
    };
    daemon::run(&plan, &home, cx)
}
