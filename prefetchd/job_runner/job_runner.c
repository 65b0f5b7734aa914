/*
 * Runs one compile so that it always ends, whole.
 *
 * nvcc is a tree of processes (a shell, cicc, ptxas). Killing its root leaves the others running, and a parent
 * that dies leaves all of them. This runner is the root's parent: the command gets a process group of its own, and
 * the runner, a child subreaper, inherits whatever the command orphans. Whichever comes first - the command's
 * exit, the time limit, a request to stop, the death of the process that started us - every descendant is gone
 * and reaped before the runner ends.
 *
 * The subtle rule: nothing is decided in a signal handler. The signals of interest are blocked and taken one at a
 * time with sigtimedwait, so there is no race between checking and waiting.
 *
 *   job_runner --timeout SECONDS --memory BYTES --nice N --parent PID --report FD -- COMMAND...
 *
 * (0 = no limit of time or memory; the niceness is added to ours.) Two lines of JSON are written to FD: {"group": ...} by the child before it
 * becomes the command, so that a starter whose runner is killed can end the group itself, and the result at the end.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* What a shell answers for a command that cannot be started. */
#define EXIT_CANNOT_START 127
#define EXIT_USAGE 2

/* Of one file that the command writes. A cubin and nvcc's intermediate files are a few MB; a log without end would
 * fill the disk that the engine's cache is on. */
static const rlim_t FILE_LIMIT_BYTES = (rlim_t)1 << 30;
/* Time between SIGTERM and SIGKILL: nvcc dies of the first in milliseconds, a wrapper script may clean up. */
static const double GRACE_S = 2.0;
/* A process in an uninterruptible wait (a dead network mount) outlives SIGKILL; we report without it after this. */
static const double REAP_LIMIT_S = 10.0;
/* Orphans become our children only when their parent dies, so the kill is repeated at this interval. */
static const double REAP_STEP_S = 0.02;

struct options {
    double timeout_s;
    unsigned long long memory_bytes;
    int nice;
    pid_t parent;
    int report;
    char **command;
};

struct ending {
    const char *reason;
    int ended;  /* the command itself was reaped, and status is its */
    int status;
};

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void usage(const char *what) {
    fprintf(stderr,
            "job_runner: %s\n"
            "usage: job_runner --timeout SECONDS --memory BYTES --nice N --parent PID --report FD -- COMMAND...\n",
            what);
    exit(EXIT_USAGE);
}

static double number(const char *name, const char *text) {
    char *end;
    errno = 0;
    double value = strtod(text, &end);
    if (errno != 0 || end == text || *end != '\0') {
        fprintf(stderr, "job_runner: --%s %s is not a number\n", name, text);
        exit(EXIT_USAGE);
    }
    return value;
}

static struct options parse(int argc, char **argv) {
    static const struct option names[] = {
        {"timeout", required_argument, NULL, 't'}, {"memory", required_argument, NULL, 'm'},
        {"nice", required_argument, NULL, 'n'},    {"parent", required_argument, NULL, 'p'},
        {"report", required_argument, NULL, 'r'},  {NULL, 0, NULL, 0},
    };
    struct options o = {.parent = getppid(), .report = -1};
    int c, index = 0;
    while ((c = getopt_long(argc, argv, "+", names, &index)) != -1) {
        switch (c) {
        case 't': o.timeout_s = number("timeout", optarg); break;
        case 'm': o.memory_bytes = (unsigned long long)number("memory", optarg); break;
        case 'n': o.nice = (int)number("nice", optarg); break;
        case 'p': o.parent = (pid_t)number("parent", optarg); break;
        case 'r': o.report = (int)number("report", optarg); break;
        default: usage("unknown option");
        }
    }
    if (o.report < 0)
        usage("--report is missing");
    if (argv[optind] == NULL)
        usage("no command");
    o.command = argv + optind;
    return o;
}

/* Sets both limits, but never above what our starter was allowed: root could. */
static void lower(__rlimit_resource_t resource, rlim_t value) {
    struct rlimit limit;
    if (getrlimit(resource, &limit) == 0 && value < limit.rlim_max)
        setrlimit(resource, &(struct rlimit){value, value});
}

/* Takes over the new child: limits, its own group, and death with the runner; then becomes the command. */
static void become(const struct options *o, const sigset_t *original, pid_t runner) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != runner)  /* the runner died before prctl: no signal will come */
        _exit(EXIT_CANNOT_START);
    if (o->memory_bytes != 0)
        lower(RLIMIT_AS, o->memory_bytes);
    lower(RLIMIT_FSIZE, FILE_LIMIT_BYTES);
    lower(RLIMIT_CORE, 0);
    dprintf(o->report, "{\"group\": %d}\n", (int)getpid());
    sigprocmask(SIG_SETMASK, original, NULL);
    execvp(o->command[0], o->command);
    fprintf(stderr, "job_runner: cannot start %s: %s\n", o->command[0], strerror(errno));
    _exit(EXIT_CANNOT_START);
}

/* Reaps all that has ended; notes the command's own status. True while children are left. */
static int reap(pid_t command, struct ending *e) {
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid == 0)
            return 1;
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid < 0)
            return 0;
        if (pid == command) {
            e->ended = 1;
            e->status = status;
        }
    }
}

/* Kills our direct children, those included that left the group by setsid and fell to us as their subreaper. */
static void kill_children(void) {
    FILE *file = fopen("/proc/thread-self/children", "re");
    int pid;
    if (file == NULL)
        return;
    while (fscanf(file, "%d", &pid) == 1)
        kill(pid, SIGKILL);
    fclose(file);
}

/* Why a stop signal came: the parent-death signal is SIGTERM too, and only the parent's id tells them apart. */
static const char *stop_reason(const struct options *o) {
    return getppid() != o->parent ? "parent" : "cancelled";
}

/* Waits until the command ends, the deadline passes or someone wants us to stop. */
static void wait_for_end(const struct options *o, pid_t command, const sigset_t *signals, struct ending *e) {
    double deadline = now_s() + o->timeout_s;
    for (;;) {
        reap(command, e);
        if (e->ended)
            return;
        int got;
        if (o->timeout_s > 0) {
            double left = deadline - now_s();
            if (left <= 0) {
                e->reason = "timeout";
                return;
            }
            struct timespec t = {(time_t)left, (long)((left - (double)(time_t)left) * 1e9)};
            got = sigtimedwait(signals, NULL, &t);
        } else {
            got = sigwaitinfo(signals, NULL);
        }
        if (got > 0 && got != SIGCHLD) {
            e->reason = stop_reason(o);
            return;
        }
    }
}

/* Ends whatever is left: politely while the command itself still runs, then by SIGKILL until nothing is. */
static void end_all(pid_t command, struct ending *e) {
    struct timespec step = {0, (long)(REAP_STEP_S * 1e9)};
    if (!e->ended) {
        double grace = now_s() + GRACE_S;
        kill(-command, SIGTERM);
        while (reap(command, e) && !e->ended && now_s() < grace)
            nanosleep(&step, NULL);
    }
    double limit = now_s() + REAP_LIMIT_S;
    do {
        kill(-command, SIGKILL);
        kill_children();
        if (!reap(command, e))
            return;
        nanosleep(&step, NULL);
    } while (now_s() < limit);
}

static double seconds(struct timeval t) {
    return (double)t.tv_sec + (double)t.tv_usec / 1e6;
}

static void report(const struct options *o, const struct ending *e, double started) {
    struct rusage used;  /* the kernel's sum over every descendant that was waited for, here or by its parent */
    getrusage(RUSAGE_CHILDREN, &used);
    const char *reason = e->reason;
    if (reason == NULL)
        reason = WIFSIGNALED(e->status) ? "signal" : "exit";
    char code[16] = "null", sig[16] = "null";
    if (e->ended && WIFEXITED(e->status))
        snprintf(code, sizeof code, "%d", WEXITSTATUS(e->status));
    if (e->ended && WIFSIGNALED(e->status))
        snprintf(sig, sizeof sig, "%d", WTERMSIG(e->status));
    dprintf(o->report,
            "{\"reason\": \"%s\", \"exit_code\": %s, \"signal\": %s, \"user_s\": %.6f, \"system_s\": %.6f,"
            " \"max_rss\": %lld, \"wall_s\": %.6f}\n",
            reason, code, sig, seconds(used.ru_utime), seconds(used.ru_stime), (long long)used.ru_maxrss * 1024,
            now_s() - started);
}

int main(int argc, char **argv) {
    struct options o = parse(argc, argv);
    double started = now_s();
    sigset_t signals, original;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGHUP);
    sigprocmask(SIG_BLOCK, &signals, &original);
    signal(SIGPIPE, SIG_IGN);  /* the reader of the report may be gone; the group must end all the same */
    signal(SIGCHLD, SIG_DFL);  /* an inherited SIG_IGN would reap behind our back */

    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != o.parent) {  /* it died before prctl: no signal will come */
        fprintf(stderr, "job_runner: process %d, which --parent names, is not our parent; nothing was started\n",
                (int)o.parent);
        return EXIT_CANNOT_START;
    }
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    fcntl(o.report, F_SETFD, FD_CLOEXEC);
    setpriority(PRIO_PROCESS, 0, getpriority(PRIO_PROCESS, 0) + o.nice);

    pid_t runner = getpid();
    pid_t command = fork();
    if (command < 0) {
        fprintf(stderr, "job_runner: cannot fork: %s\n", strerror(errno));
        return EXIT_CANNOT_START;
    }
    if (command == 0) {
        signal(SIGPIPE, SIG_DFL);
        become(&o, &original, runner);
    }
    setpgid(command, command);  /* in both, so that the group exists whoever runs first */

    struct ending e = {.reason = NULL};
    wait_for_end(&o, command, &signals, &e);
    end_all(command, &e);
    report(&o, &e, started);
    return 0;
}
