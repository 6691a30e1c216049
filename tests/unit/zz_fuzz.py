import random, time, threading, os
from tests.unit.crew import *
from tests.unit.test_groups import outcome_of_connecting, PAIR
def race(me, where, delay):
    leave(me); me.connector=Connector(where)
    parked=threading.Event()
    t=threading.Timer(delay, lambda: me.connector.abort_until(parked, 30)); t.start()
    b=time.monotonic()
    try:
        me.groups = me.connector.connect(PAIR, me.rank); r="connected"
    except Exception as e: r=type(e).__name__+(" "+str(e)[:80] if type(e).__name__=="PeerFailed" else "")
    parked.set()
    d=time.monotonic()-b-delay
    t.join(); return r, round(d,3)
def look(me):
    import sys, traceback, subprocess
    out=""
    for k,f in sys._current_frames().items(): out+="".join(traceback.format_stack(f)[-3:])+"--\n"
    out+=str([os.readlink("/proc/self/fd/"+x) for x in os.listdir("/proc/self/fd") if x!="zz" and os.path.exists("/proc/self/fd/"+x)])
    out+=subprocess.run("ss -tnp 2>/dev/null | grep pid=%d; cat /proc/%d/task/*/wchan"%(os.getpid(),os.getpid()),shell=True,capture_output=True,text=True).stdout
    return out+str(vars(me.connector))+str(me.rank)
if __name__=="__main__":
    from tests.unit.zz_fuzz import race
    from collections import Counter
    c=Counter(); worst=[]
    with crew(2) as p:
        random.seed(0)
        for i in range(300):
            w=p.meeting(); 
            p.start(0, race, w, random.random()*0.06); p.start(1, race, w, random.random()*0.06)
            try: r=[p.result(0),p.result(1)]
            except AssertionError as e:
                print(i,e)
                import subprocess
                for k in (0,1):
                    print(k, subprocess.run(f'timeout 100 gdb -p {p.processes[k].pid} -batch -ex "thread apply all bt 16" 2>/dev/null | grep -E "^Thread|gloo|c10d" | cut -c1-150',shell=True,capture_output=True,text=True).stdout)
                for k in (0,1):
                    try: print(p.now(k, look))
                    except AssertionError as x: print(x)
                break
            for x,d in r: c[x]+=1; worst.append((d,x,i))
    print(c, sorted(worst)[-8:])
