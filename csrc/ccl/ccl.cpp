#include "ccl.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <oneapi/ccl.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#define PA_CCL_TEXT_OF(value) #value
#define PA_CCL_TEXT(value) PA_CCL_TEXT_OF(value)

// What this is compiled for. Python looks for it in the file, so as to know without loading it (ccl_build.py).
__attribute__((used)) static const char stamp[] = "polyaccel_ccl ABI " PA_CCL_TEXT(PA_CCL_ABI_VERSION) " for oneCCL "  //
    PA_CCL_TEXT(CCL_MAJOR_VERSION) "." PA_CCL_TEXT(CCL_MINOR_VERSION) "." PA_CCL_TEXT(CCL_UPDATE_VERSION);

struct pa_ccl_group {
    const int64_t number;  // no two groups of this process have the same
    std::shared_ptr<ccl::kvs> meeting;
    std::optional<ccl::communicator> ranks;
    std::string failure;  // of a call, after which oneCCL is not asked again
};

namespace {

constexpr int64_t KEPT_NUMEL = 16384;  // up to here oneCCL keeps its plan of an all-reduce, which is faster by a fifth

struct Job {
    std::function<void()> run;
    int32_t state = PA_CCL_PENDING;
    std::string error;
};

// The one thread that calls oneCCL. Never destroyed: at exit it may hang in a call whose peers are gone.
class Caller {
  public:
    static Caller& instance() {
        static Caller* const caller = new Caller;
        return *caller;
    }

    std::shared_ptr<Job> submit(std::function<void()> run) {
        auto job = std::make_shared<Job>();
        job->run = std::move(run);
        std::lock_guard<std::mutex> lock(mutex_);
        if (!started_) {
            std::thread([this] { work(); }).detach();
            started_ = true;
        }
        jobs_.push_back(job);
        submitted_.notify_one();
        return job;
    }

    int32_t wait(Job& job, int64_t timeout_ns) {
        std::unique_lock<std::mutex> lock(mutex_);
        ended_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [&] { return job.state != PA_CCL_PENDING; });
        return job.state;
    }

    bool is_calling() {
        std::lock_guard<std::mutex> lock(mutex_);
        return is_calling_;
    }

  private:
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            submitted_.wait(lock, [this] { return !jobs_.empty(); });
            auto job = jobs_.front();
            jobs_.pop_front();
            is_calling_ = true;
            lock.unlock();
            std::string error;
            bool failed = false;
            try {
                job->run();
            } catch (const std::exception& exception) {
                failed = true;
                error = exception.what();
            } catch (...) {
                failed = true;
                error = "an exception of an unknown type";
            }
            job->run = nullptr;
            lock.lock();
            job->error = error;
            job->state = failed ? PA_CCL_FAILED : PA_CCL_DONE;
            is_calling_ = false;
            ended_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable submitted_, ended_;
    std::deque<std::shared_ptr<Job>> jobs_;
    bool started_ = false;
    bool is_calling_ = false;
};

constexpr ccl::datatype TYPES[] = {
    ccl::datatype::float64, ccl::datatype::float32, ccl::datatype::bfloat16, ccl::datatype::float16, ccl::datatype::int64,
    ccl::datatype::int32,   ccl::datatype::int16,   ccl::datatype::int8,     ccl::datatype::uint8,
};
constexpr ccl::reduction REDUCES[] = {
    ccl::reduction::sum, ccl::reduction::max, ccl::reduction::min, ccl::reduction::prod
};

// All-reduces of equal `number`, type, reduction and size have the same plan.
ccl::allreduce_attr attributes(int64_t number, const pa_ccl_call& call) {
    auto attribute = ccl::create_operation_attr<ccl::allreduce_attr>();
    if (call.numel <= KEPT_NUMEL) {
        std::string plan;
        for (const int64_t part : {number, int64_t{call.type}, int64_t{call.reduce}, call.numel}) {
            plan += std::to_string(part) + " ";
        }
        attribute.set<ccl::operation_attr_id::match_id>(ccl::string_class(plan.c_str()));
        attribute.set<ccl::operation_attr_id::to_cache>(true);
    }
    return attribute;
}

ccl::event start(const pa_ccl_call& call, const pa_ccl_group& group) {
    const auto& ranks = *group.ranks;
    const auto numel = static_cast<size_t>(call.numel);
    const auto type = TYPES[call.type];
    const auto reduce = REDUCES[call.reduce];
    switch (call.op) {
        case PA_CCL_BARRIER:
            return ccl::barrier(ranks);
        case PA_CCL_ALL_REDUCE:
            return ccl::allreduce(call.in, call.out, numel, type, reduce, ranks, attributes(group.number, call));
        case PA_CCL_REDUCE_SCATTER:
            return ccl::reduce_scatter(call.in, call.out, numel, type, reduce, ranks);
        case PA_CCL_ALL_GATHER:
            return ccl::allgatherv(call.in, numel, call.out, std::vector<size_t>(ranks.size(), numel), type, ranks);
        case PA_CCL_BROADCAST:
            return ccl::broadcast(call.out, numel, type, call.root, ranks);
        case PA_CCL_ALL_TO_ALL:
            return ccl::alltoall(call.in, call.out, numel, type, ranks);
    }
    throw std::invalid_argument("no such collective: " + std::to_string(call.op));
}

pa_ccl_job* submit(std::function<void()> run) {
    return reinterpret_cast<pa_ccl_job*>(new std::shared_ptr<Job>(Caller::instance().submit(std::move(run))));
}

Job& job_of(pa_ccl_job* job) { return **reinterpret_cast<std::shared_ptr<Job>*>(job); }

std::string version(int major, int minor, int update) {
    return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(update);
}

}  // namespace

int32_t pa_ccl_abi_version() { return PA_CCL_ABI_VERSION; }

const char* pa_ccl_built_for() { return std::strrchr(stamp, ' ') + 1; }

const char* pa_ccl_loaded() {
    static const std::string text = [] {
        const auto found = ccl::get_library_version();
        return version(found.major, found.minor, found.update);
    }();
    return text.c_str();
}

void pa_ccl_guard_exit() {
    on_exit(
        [](int status, void*) {
            if (Caller::instance().is_calling()) {
                fflush(nullptr);
                _exit(status);
            }
        },
        nullptr
    );
}

pa_ccl_group* pa_ccl_new_group() {
    static std::atomic<int64_t> number;
    return new pa_ccl_group{number++, nullptr, std::nullopt, {}};
}

pa_ccl_job* pa_ccl_host(pa_ccl_group* group, char* address) {
    return submit([=] {
        ccl::init();
        group->meeting = ccl::create_main_kvs();
        const auto found = group->meeting->get_address();
        static_assert(sizeof(found) == PA_CCL_ADDRESS_NBYTES, "oneCCL's addresses have another size");
        std::memcpy(address, found.data(), sizeof(found));
    });
}

pa_ccl_job* pa_ccl_join(pa_ccl_group* group, const char* address, int32_t rank, int32_t world) {
    std::optional<ccl::kvs::address_type> place;
    if (address != nullptr) {
        place.emplace();
        std::memcpy(place->data(), address, place->size());
    }
    return submit([=] {
        ccl::init();
        if (place) group->meeting = ccl::create_kvs(*place);
        group->ranks.emplace(ccl::create_communicator(world, rank, group->meeting));
    });
}

pa_ccl_job* pa_ccl_collective(pa_ccl_group* group, const pa_ccl_call* call) {
    return submit([group, call = *call] {
        if (!group->failure.empty()) throw std::runtime_error("an earlier call failed: " + group->failure);
        try {
            start(call, *group).wait();
        } catch (const std::exception& exception) {
            group->failure = exception.what();
            throw;
        }
    });
}

pa_ccl_job* pa_ccl_leave(pa_ccl_group* group) {
    return submit([group] {
        if (group->failure.empty()) delete group;  // else oneCCL may wait for peers that have gone
    });
}

int32_t pa_ccl_wait(pa_ccl_job* job, int64_t timeout_ns) { return Caller::instance().wait(job_of(job), timeout_ns); }

const char* pa_ccl_error(pa_ccl_job* job) { return job_of(job).error.c_str(); }

void pa_ccl_free(pa_ccl_job* job) { delete reinterpret_cast<std::shared_ptr<Job>*>(job); }
